// The plan of a step as the device makes it, from lengths that only the device knows. Every warp
// computes it for itself. Device code only.
#pragma once

#include <cstdint>

#include "winnow/device/common/warp.cuh"
#include "winnow/paged_xl/split.h"
#include "winnow/paged_xl/tile_cuda.cuh"

namespace winnow::paged_xl {

template <class T>
__device__ __forceinline__ int tiles_of(int length) {
  return length / kTile<T> + (length % kTile<T> != 0);
}

template <class T>
__device__ StepWork sum_up(const Lengths& lengths, int lane) {
  StepWork work;
  for (int s = lane; s < lengths.num_seqs; s += kWarpSize) {
    const int length = lengths[s];
    work.tiles += tiles_of<T>(length);
    work.longest = max(work.longest, length);
  }
  work.tiles = device::warp_sum(work.tiles);
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
  return device::warp_sum(parts);
}

// One part of one context for one cached head.
struct Part {
  int sequence, length;  // tokens
  int head, number;      // of the part in its context
  int first_tile, end_tile;
  bool whole;  // it is the whole context
};

// Where a warp's walk is. It stands in shared memory: the registers are for the tiles.
struct WalkState {
  Split split;
  std::int64_t begin, end;  // of the block's stretch
  std::int64_t at;          // tiles of the line up to and with the 32 places
  int most_parts;           // of a context
  int head;
  int part, sequence;  // of the first place
  int before;          // parts of the stretch that are behind
  unsigned mine;       // places whose part belongs to the stretch
};

// Goes along one block's stretch of the line, 32 places at a time, one for each lane; some of them
// are empty, since contexts have different numbers of parts. The whole warp must call.
template <class T>
class Walk {
 public:
  __device__ Walk(const Lengths& lengths, WalkState& state, int lane)
      : lengths_(lengths), saved_(state), state_(state), lane_(lane) {}
  __device__ ~Walk() {
    __syncwarp();
    if (lane_ == 0) saved_ = state_;
    __syncwarp();
  }

  // Goes to the first places of a block's stretch.
  __device__ void begin(const Split& split, const StepWork& work, int block) {
    state_ = {};
    state_.split = split;
    state_.begin = state_.split.begin(block);
    state_.end = state_.split.begin(block + 1);
    state_.most_parts = state_.split.parts_of(tiles_of<T>(work.longest));
    state_.head = static_cast<int>(state_.begin / state_.split.tiles);
    const std::int64_t before = state_.head * state_.split.tiles;
    state_.part = last_part_before(state_.begin - before);
    state_.at += before;
    look();
  }

  // Part `index` of the stretch, not less than any index before; false if there are not so many.
  __device__ bool find(int index, Part& part) {
    while (index >= state_.before + __popc(state_.mine)) {
      state_.before += __popc(state_.mine);
      state_.mine = 0;
      if (state_.at >= state_.end) return false;
      advance();
    }
    const int rank = __popc(state_.mine & ((1u << lane_) - 1));
    const bool found = (state_.mine >> lane_ & 1) != 0 && rank == index - state_.before;
    const int place = __ffs(static_cast<int>(__ballot_sync(device::kFullWarp, found))) - 1;
    part.sequence = sequence_at(place);
    part.number = part_at(place);
    part.length = lengths_[part.sequence];
    part.head = state_.head;
    const int tiles = tiles_of<T>(part.length);
    part.end_tile = tiles - part.number * state_.split.part_tiles;
    part.first_tile = max(0, part.end_tile - state_.split.part_tiles);
    part.whole = tiles <= state_.split.part_tiles;
    return true;
  }

 private:
  // The last part number p for which the parts below p of all contexts have no more than `tiles`
  // tiles; `at` becomes their number. Each lane tries a number.
  __device__ int last_part_before(std::int64_t tiles) {
    int first = 0, count = state_.most_parts;
    while (true) {
      const int step = (count + kWarpSize - 1) / kWarpSize;
      const std::int64_t wanted = (first + std::int64_t{step} * lane_) * state_.split.part_tiles;
      std::int64_t below = 0;
      for (int s = 0; s < lengths_.num_seqs; ++s) {
        below += min(std::int64_t{tiles_of<T>(lengths_[s])}, wanted);
      }
      const unsigned good =
          __ballot_sync(device::kFullWarp, below <= tiles && step * std::int64_t{lane_} < count);
      const int last = kWarpSize - 1 - __clz(static_cast<int>(good));  // lane 0 is good
      first += step * last;
      count = min(step, count - step * last);
      state_.at = __shfl_sync(device::kFullWarp, below, last);
      if (step == 1) return first;
    }
  }

  __device__ int sequence_at(int place) const {
    return (state_.sequence + place) % lengths_.num_seqs;
  }
  __device__ int part_at(int place) const {
    return state_.part + (state_.sequence + place) / lengths_.num_seqs;
  }

  __device__ void advance() {
    const int next = sequence_at(kWarpSize);
    state_.part = part_at(kWarpSize);
    state_.sequence = next;
    if (state_.part >= state_.most_parts) {
      state_.part = state_.sequence = 0;
      ++state_.head;
    }
    look();
  }

  __device__ void look() {
    const int weight =
        state_.split.tiles_in(tiles_of<T>(lengths_[sequence_at(lane_)]), part_at(lane_));
    const int weights = device::warp_prefix(weight, lane_);
    const std::int64_t position = state_.at + (weights - weight);
    state_.mine = __ballot_sync(device::kFullWarp,
                                weight > 0 && position >= state_.begin && position < state_.end);
    state_.at += __shfl_sync(device::kFullWarp, weights, kWarpSize - 1);
  }

  const Lengths& lengths_;
  WalkState& saved_;
  WalkState state_;
  const int lane_;
};

}  // namespace winnow::paged_xl
