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
  int head;
  int first_tile, end_tile;
  std::int64_t number;  // among the parts of all sequences; the same in all heads
  bool whole;           // it is the whole context
};

// Goes along one block's stretch of the line, 32 sequences at a time. The whole warp must call.
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
    if (begin_ >= end_) return;
    head_ = static_cast<int>(begin_ / split.tiles);
    // The last part number at which the line is not beyond the stretch's begin.
    const std::int64_t within = begin_ - head_ * split.tiles;
    int beyond = most_parts_;
    while (beyond - part_ > 1) {
      const int middle = part_ + (beyond - part_) / 2;
      (tiles_before(middle) <= within ? part_ : beyond) = middle;
    }
    at_ = head_ * split.tiles + tiles_before(part_);
    look();
  }

  // Part `index` of the stretch, not less than any index before; false if there are not so many.
  __device__ bool find(int index, Part& part) {
    while (index >= before_ + __popc(mine_)) {
      before_ += __popc(mine_);
      if (at_ >= end_) return false;
      advance();
    }
    const int rank = __popc(mine_ & ((1u << lane_) - 1));
    const bool found = (mine_ >> lane_ & 1) != 0 && rank == index - before_;
    const int source = __ffs(static_cast<int>(__ballot_sync(device::kFullWarp, found))) - 1;
    const int tiles = tiles_of<T>(__shfl_sync(device::kFullWarp, length_, source));
    part.sequence = first_ + source;
    part.length = __shfl_sync(device::kFullWarp, length_, source);
    part.head = head_;
    part.end_tile = tiles - part_ * split_.part_tiles;
    part.first_tile = max(0, part.end_tile - split_.part_tiles);
    part.number = __shfl_sync(device::kFullWarp, number_, source);
    part.whole = tiles <= split_.part_tiles;
    return true;
  }

 private:
  // Tiles of one head that lie in parts below `part`.
  __device__ std::int64_t tiles_before(int part) const {
    std::int64_t tiles = 0;
    for (int s = lane_; s < lengths_.num_seqs; s += kWarpSize) {
      tiles += min(std::int64_t{tiles_of<T>(lengths_[s])}, std::int64_t{part} * split_.part_tiles);
    }
    return warp_sum(tiles);
  }

  __device__ void advance() {
    numbers_ += __shfl_sync(device::kFullWarp, parts_, kWarpSize - 1);
    first_ += kWarpSize;
    if (first_ >= lengths_.num_seqs) {
      first_ = 0;
      numbers_ = 0;
      if (++part_ == most_parts_) {
        part_ = 0;
        ++head_;
      }
    }
    look();
  }

  // At the 32 sequences from first_.
  __device__ void look() {
    length_ = first_ + lane_ < lengths_.num_seqs ? lengths_[first_ + lane_] : 0;
    const int tiles = tiles_of<T>(length_);
    const int weight = split_.tiles_in(tiles, part_), own = split_.parts_of(tiles);
    const int weights = warp_prefix(weight, lane_);
    parts_ = warp_prefix(own, lane_);
    number_ = numbers_ + (parts_ - own) + part_;
    const std::int64_t position = at_ + (weights - weight);
    mine_ = __ballot_sync(device::kFullWarp, weight > 0 && position >= begin_ && position < end_);
    at_ += __shfl_sync(device::kFullWarp, weights, kWarpSize - 1);
  }

  const Lengths& lengths_;
  const Split& split_;
  const std::int64_t begin_, end_;
  const int lane_, most_parts_;
  int head_ = 0, part_ = 0, first_ = 0;  // where the walk is
  std::int64_t at_ = 0;                  // the line's tile behind these sequences
  std::int64_t numbers_ = 0;             // parts of the sequences before first_
  int before_ = 0;                       // parts of the stretch that are behind
  // Of the lane's sequence.
  int length_ = 0, parts_ = 0;
  std::int64_t number_ = 0;
  unsigned mine_ = 0;  // lanes whose part belongs to the stretch
};

}  // namespace winnow::paged_xl
