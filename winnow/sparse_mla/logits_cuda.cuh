// The logits of a tile (attention_cuda.cuh) from the warps that have parts of the columns to those
// that have heads: warp w has heads 8 w to 8 w + 7, and of a head four lanes of it.
//
// What goes from one warp to another lies in shared memory as the lanes have it, so that neither
// side has bank conflicts or addresses to find: lane l gives 8 columns at a time of head
// 8 w + l / 4, and lane l of warp w takes them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "winnow/sparse_mla/attention_cuda.cuh"

namespace winnow::sparse_mla::attention_cuda {

// What a warp gets from one warp: pairs of f32.
using Partials = std::uint64_t[kRows / 8][32];

// Of a block of kWarps warps, with eight heads for each.
template <DType kType_, int kDim_, int kParts_, int kWarps_ = attention_cuda::kWarps>
struct Parts {
  static constexpr DType kType = kType_;
  static constexpr int kDim = kDim_, kParts = kParts_;
  static constexpr int kWarps = kWarps_, kThreads = 32 * kWarps, kHeads = 8 * kWarps;
  static constexpr int kWarpColumns = kValueColumns / kWarps;    // of the output
  static constexpr int kSteps = kDim / 16 / kParts;              // of 16 columns, of a warp
  static constexpr int kBlocks = kHeads / 16 * kParts / kWarps;  // of 16 heads, of a warp
  static_assert(4 % kParts == 0 && kSteps * kParts * 16 == kDim);
};

// Gives what a lane has of the logits of 16 heads, the block `m` of the warp's, and 8 rows, the
// block `n` of the tile's. `first`: of the lane, for the first of the warps that get them.
template <int kParts>
__device__ __forceinline__ void give_block(Place<std::uint64_t> first, int m, int n,
                                           const float (&s)[4]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {  // heads 16 m + 8 r of the part are those of warp 2 m + r
    const std::uint64_t high = __float_as_uint(s[2 * r + 1]);
    const int to = ((2 * m + r) * kParts * (kRows / 8) + n) * 32;
    (first + to).store(high << 32 | __float_as_uint(s[2 * r]));
  }
}

// Multiplies the warp's part, and gives each warp what it gets of the logits. `partials`: of all
// warps, from each of those that share heads. Among the products copy(chunk) is called for each
// chunk of a row.
template <class P, class Copy>
__device__ __forceinline__ void give_logits(P shared, int slot,
                                            Place<Partials[P::kWarps][P::kParts]> partials,
                                            int warp, int lane, const Queries<P>& q,
                                            const Copy& copy) {
  const auto k = squares_of_part(shared, slot, warp, lane);
  const int part = warp % P::kParts;
  const auto first = partials[warp - part][part][0][lane];
  static_assert(Copy::kChunks <= P::kSteps);
#pragma unroll
  for (int half = 0; half < kRows / 16; ++half) {
    float s[P::kBlocks][2][4] = {};
    multiply_part<P>(k, half, q, s, [&](int step) {
      if (half == 0) copy(step);
    });
#pragma unroll
    for (int m = 0; m < P::kBlocks; ++m) {
#pragma unroll
      for (int n = 0; n < 2; ++n) give_block<P::kParts>(first, m, 2 * half + n, s[m][n]);
    }
  }
}

// The lane's 8 logits of its head, without the scale: x[n][e] is that of entry
// 8 n + 2 (lane % 4) + e.
using Logits = float[kRows / 8][2];

template <int kParts, std::size_t kWarps>
__device__ __forceinline__ void take_logits(Place<Partials[kWarps][kParts]> partials, int warp,
                                            int lane, Logits& x) {
  const auto first = partials[warp][0][0][lane];
#pragma unroll
  for (int n = 0; n < kRows / 8; ++n) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const std::uint64_t pair = (first + (part * (kRows / 8) + n) * 32).load();
      const float low = __uint_as_float(static_cast<std::uint32_t>(pair));
      const float high = __uint_as_float(static_cast<std::uint32_t>(pair >> 32));
      x[n][0] = part == 0 ? low : x[n][0] + low;
      x[n][1] = part == 0 ? high : x[n][1] + high;
    }
  }
}

// The lane's part of a tile's mask: bit 8 n + e says whether the entry of x[n][e] is visible.
__device__ __forceinline__ std::uint32_t own_entries(std::uint32_t mask, int lane) {
  return mask >> 2 * (lane & 3);
}
__device__ __forceinline__ bool sees(std::uint32_t own, int n, int e) {
  return own >> (8 * n + e) & 1;
}

}  // namespace winnow::sparse_mla::attention_cuda
