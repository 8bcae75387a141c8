// The plan of a step as the device makes it, from lengths that only the device knows. Every warp
// computes it for itself. Device code only.
#pragma once

#include <cstdint>

#include "winnow/paged_xl/split.h"
#include "winnow/paged_xl/tile_cuda.cuh"

namespace winnow::paged_xl {

template <class T>
__device__ __forceinline__ int tiles_of(int length) {
  return length / kTile<T> + (length % kTile<T> != 0);
}

__device__ __forceinline__ std::int64_t warp_sum(std::int64_t x) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(device::kFullWarp, x, distance);
  }
  return x;
}

// The sum over this lane and those below.
__device__ __forceinline__ int warp_prefix(int x, int lane) {
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const int below = __shfl_up_sync(device::kFullWarp, x, distance);
    if (lane >= distance) x += below;
  }
  return x;
}

template <class T>
__device__ StepWork sum_up(const Lengths& lengths, int lane) {
  StepWork work;
  for (int s = lane; s < lengths.num_seqs; s += kWarpSize) {
    const int length = lengths[s];
    work.tiles += tiles_of<T>(length);
    work.longest = max(work.longest, length);
  }
  work.tiles = warp_sum(work.tiles);
  work.longest = __reduce_max_sync(device::kFullWarp, work.longest);
  return work;
}

// Parts of the sequences before s.
template <class T>
__device__ std::int64_t parts_before(const Lengths& lengths, const Split& split, int s, int lane) {
  std::int64_t parts = 0;
  for (int other = lane; other < s; other += kWarpSize) {
    parts += split.parts_of(tiles_of<T>(lengths[other]));
  }
  return warp_sum(parts);
}

// One part of one context for one cached head.
struct Part {
  int sequence, length;  // tokens
  int head, number;      // of the part in its context
  int first_tile, end_tile;
  bool whole;  // it is the whole context
};

// Goes along one block's stretch of the line, 32 places at a time; some of them are empty, since
// contexts have different numbers of parts. The whole warp must call.
template <class T>
class Walk {
 public:
  __device__ Walk(const Lengths& lengths, const StepWork& work, const Split& split, int block,
                  int lane)
      : lengths_(lengths),
        split_(split),
        begin_(split.begin(block)),
        end_(split.begin(block + 1)),
        lane_(lane),
        most_parts_(split.parts_of(tiles_of<T>(work.longest))) {
    head_ = static_cast<int>(begin_ / split.tiles);
    const int part = last_part_before(begin_ - head_ * split.tiles);
    at_ = head_ * split.tiles + at_;
    go_to(part);
    look();
  }

  // Part `index` of the stretch, not less than any index before; false if there are not so many.
  __device__ bool find(int index, Part& part) {
    while (index >= before_ + __popc(mine_)) {
      before_ += __popc(mine_);
      mine_ = 0;
      if (at_ >= end_) return false;
      advance();
    }
    const int rank = __popc(mine_ & ((1u << lane_) - 1));
    const bool found = (mine_ >> lane_ & 1) != 0 && rank == index - before_;
    const int source = __ffs(static_cast<int>(__ballot_sync(device::kFullWarp, found))) - 1;
    part.sequence = __shfl_sync(device::kFullWarp, sequence_, source);
    part.number = __shfl_sync(device::kFullWarp, part_, source);
    part.length = __shfl_sync(device::kFullWarp, length_, source);
    part.head = head_;
    const int tiles = tiles_of<T>(part.length);
    part.end_tile = tiles - part.number * split_.part_tiles;
    part.first_tile = max(0, part.end_tile - split_.part_tiles);
    part.whole = tiles <= split_.part_tiles;
    return true;
  }

 private:
  // The last part number p for which the parts below p of all contexts have no more than `tiles`
  // tiles; at_ becomes their number. Each lane tries a number.
  __device__ int last_part_before(std::int64_t tiles) {
    int first = 0, count = most_parts_;
    while (true) {
      const int step = (count + kWarpSize - 1) / kWarpSize;
      const std::int64_t wanted = (first + std::int64_t{step} * lane_) * split_.part_tiles;
      std::int64_t below = 0;
      for (int s = 0; s < lengths_.num_seqs; ++s) {
        below += min(std::int64_t{tiles_of<T>(lengths_[s])}, wanted);
      }
      const unsigned good =
          __ballot_sync(device::kFullWarp, below <= tiles && step * std::int64_t{lane_} < count);
      const int last = kWarpSize - 1 - __clz(static_cast<int>(good));  // lane 0 is good
      first += step * last;
      count = min(step, count - step * last);
      at_ = __shfl_sync(device::kFullWarp, below, last);
      if (step == 1) return first;
    }
  }

  __device__ void go_to(int part) {
    part_ = part + lane_ / lengths_.num_seqs;
    sequence_ = lane_ % lengths_.num_seqs;
  }

  __device__ void advance() {
    part_ += kWarpSize / lengths_.num_seqs;
    sequence_ += kWarpSize % lengths_.num_seqs;
    if (sequence_ >= lengths_.num_seqs) {
      sequence_ -= lengths_.num_seqs;
      ++part_;
    }
    if (__all_sync(device::kFullWarp, part_ >= most_parts_)) {
      ++head_;
      go_to(0);
    }
    look();
  }

  __device__ void look() {
    length_ = lengths_[sequence_];
    const int weight = split_.tiles_in(tiles_of<T>(length_), part_);
    const int weights = warp_prefix(weight, lane_);
    const std::int64_t position = at_ + (weights - weight);
    mine_ = __ballot_sync(device::kFullWarp, weight > 0 && position >= begin_ && position < end_);
    at_ += __shfl_sync(device::kFullWarp, weights, kWarpSize - 1);
  }

  const Lengths& lengths_;
  const Split& split_;
  const std::int64_t begin_, end_;
  const int lane_, most_parts_;
  int head_ = 0;
  std::int64_t at_ = 0;                       // tiles of the line up to and with these places
  int before_ = 0;                            // parts of the stretch that are behind
  int part_ = 0, sequence_ = 0, length_ = 0;  // of the lane's place
  unsigned mine_ = 0;                         // lanes whose part belongs to the stretch
};

}  // namespace winnow::paged_xl
