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

template <class T>
__device__ StepWork sum_up(const Lengths& lengths, int lane) {
  StepWork work;
  int longest = 0;
  for (int s = lane; s < lengths.num_seqs; s += kWarpSize) {
    const int length = lengths[s];
    work.tiles += tiles_of<T>(length);
    longest = max(longest, length);
  }
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    work.tiles += __shfl_xor_sync(device::kFullWarp, work.tiles, distance);
  }
  work.longest = __reduce_max_sync(device::kFullWarp, longest);
  return work;
}

// A tile of a phase's line.
struct Place {
  int sequence, length;  // tokens
  int head;              // of the phase
  int tile, tiles;       // within the context, of the context
};

// Walks along the line of one phase. The whole warp must call.
template <class T>
class Walk {
 public:
  // Goes to the sequence of the line's tile `at`, which exists.
  __device__ Walk(const Lengths& lengths, int heads, std::int64_t at, int lane)
      : lengths_(lengths), heads_(heads) {
    const std::int64_t wanted = at / heads;  // counts tiles of one head
    std::int64_t before = 0;                 // tiles of the sequences before
    for (int first = 0;; first += kWarpSize) {
      const int s = first + lane;
      const int length = s < lengths.num_seqs ? lengths[s] : 0;
      std::int64_t sum = tiles_of<T>(length);
#pragma unroll
      for (int distance = 1; distance < kWarpSize; distance *= 2) {
        const std::int64_t below = __shfl_up_sync(device::kFullWarp, sum, distance);
        if (lane >= distance) sum += below;
      }
      const unsigned beyond = __ballot_sync(device::kFullWarp, before + sum > wanted);
      if (beyond != 0) {
        const int found = __ffs(static_cast<int>(beyond)) - 1;
        sequence_ = first + found;
        set_length(__shfl_sync(device::kFullWarp, length, found));
        before_ = before + __shfl_sync(device::kFullWarp, sum, found) - tiles_;
        return;
      }
      before += __shfl_sync(device::kFullWarp, sum, kWarpSize - 1);
    }
  }

  // The place of tile `at`, which is not before any that was asked for before.
  __device__ Place place(std::int64_t at) {
    while (at >= (before_ + tiles_) * heads_) {
      before_ += tiles_;
      set_length(lengths_[++sequence_]);
    }
    const std::int64_t in_sequence = at - before_ * heads_;
    return {sequence_, length_, static_cast<int>(in_sequence / tiles_),
            static_cast<int>(in_sequence % tiles_), tiles_};
  }

 private:
  __device__ void set_length(int length) {
    length_ = length;
    tiles_ = tiles_of<T>(length);
  }

  const Lengths& lengths_;
  const int heads_;
  int sequence_ = 0, length_ = 0, tiles_ = 0;
  std::int64_t before_ = 0;
};

}  // namespace winnow::paged_xl
