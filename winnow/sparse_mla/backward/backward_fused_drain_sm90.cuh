// Top-k sparse MLA attention, backward, sm90: how the fused kernel (backward_fused_sm90.cuh) adds
// its sums, 64 entries x 64 columns, to the rows of dkv. Two ways, which look alike to it:
//
//   FloatDrain  f32 reductions, in whatever order they come
//   FixedDrain  integer reductions, whose sum has no order: the deterministic mode
//
// Quads hold rows of their own, so they exchange blocks of columns first: whole lines of 128 bytes
// are added at the full rate of L2, halves of them at 83 % of it. Before the first load() the sums
// are zeros, for the row that nobody wants.
#pragma once

#include <cstdint>

#include "winnow/device/common/memory.cuh"
#include "winnow/device/common/shared.cuh"
#include "winnow/device/common/warp.cuh"
#include "winnow/sparse_mla/backward/backward_fixed_sm90.cuh"
#include "winnow/sparse_mla/backward/backward_items_sm90.cuh"

namespace winnow::sparse_mla::backward_fused_sm90_detail {

// Lanes kDistance apart swap: blocks[1] of the lower lane and blocks[0] of the upper one.
template <int kDistance>
__device__ __forceinline__ void swap_blocks(float (&low)[4], float (&high)[4], int lane) {
  const bool upper = lane & kDistance;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const float got = __shfl_xor_sync(kFullWarp, upper ? low[n] : high[n], kDistance);
    low[n] = upper ? got : low[n];
    high[n] = upper ? high[n] : got;
  }
}

// 4 values a lane, 8 lanes to a row.
struct FloatDrain {
  static constexpr bool kFixed = false;
  static constexpr bool kLooped = false;
  static constexpr int kLanes = 8;            // that add to a row together
  static constexpr int kShared = kLanes / 4;  // rows that as many quads add to together
  // Of the warp's rows 8 r + {0, ..., 7} a thread adds to 8 r + lane / kLanes * kShared + n.
  std::int32_t row[2][kShared];

  __device__ __forceinline__ explicit FloatDrain(std::int32_t waste)
      : row{{waste, waste}, {waste, waste}} {}

  // The rows of the tile; the other list is that of their scales.
  __device__ __forceinline__ void load(TargetList list, ScaleList, int warp, int lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int first = 16 * warp + 8 * r + lane / kLanes * kShared;
#pragma unroll
      for (int n = 0; n < kShared; ++n) row[r][n] = list[first + n].load();
    }
  }

  // Adds a product, columns 64 * chunk and on; of a lane's rows, 8 apart, those from `first` on.
  template <int kDim>
  __device__ __forceinline__ void add(const KernelParams& params, int chunk, int lane,
                                      const float (&d)[32], int first = 0, int end = 2) const {
#pragma unroll
    for (int r = first; r < end; ++r) {
      float block[4][4];  // [16 columns][of this lane]
#pragma unroll
      for (int i = 0; i < 16; ++i) block[i / 4][i % 4] = d[i / 2 * 4 + 2 * r + i % 2];
      swap_blocks<4>(block[0], block[1], lane);
      swap_blocks<4>(block[2], block[3], lane);
#pragma unroll
      for (int n = 0; n < kShared; ++n) {
        float* const to = params.dkv + static_cast<std::int64_t>(row[r][n]) * kDim + 64 * chunk +
                          4 * (lane % kLanes);
#pragma unroll
        for (int k = 0; k < 4 / kShared; ++k) {
          const float(&v)[4] = block[kShared * k + n];
          reduce_add(to + 4 * kLanes * k, {v[0], v[1], v[2], v[3]});
        }
      }
    }
  }
};

// 2 values a lane, 16 lanes to a row (backward_fixed_sm90.cuh).
struct FixedDrain {
  static constexpr bool kFixed = true;
  // The chunks of a tile share their instructions: unrolled, they leave the instruction caches.
  static constexpr bool kLooped = true;
  std::int32_t row[2][4];  // that the lane adds to
  float scale[2];          // of the rows that it holds

  __device__ __forceinline__ explicit FixedDrain(std::int32_t waste)
      : row{{waste, waste, waste, waste}, {waste, waste, waste, waste}}, scale{} {}

  __device__ __forceinline__ void load(TargetList list, ScaleList scales, int warp, int lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int first = 16 * warp + 8 * r;
      scale[r] = scales[first + lane / 4].load();
      const uint4 four = ld_shared_words(list[first + lane / 16 * 4].address);
      row[r][0] = static_cast<std::int32_t>(four.x);
      row[r][1] = static_cast<std::int32_t>(four.y);
      row[r][2] = static_cast<std::int32_t>(four.z);
      row[r][3] = static_cast<std::int32_t>(four.w);
    }
  }

  template <int kDim>
  __device__ __forceinline__ void add(const KernelParams& params, int chunk, int lane,
                                      const float (&d)[32], int first = 0, int end = 2) const {
#pragma unroll
    for (int r = first; r < end; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        unsigned long long w[4];
        backward_fixed_detail::row_words(d + 16 * half, r, scale[r], lane, w);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          reduce_add(params.fixed + static_cast<std::int64_t>(row[r][k]) * (kDim / 2) + 32 * chunk +
                         16 * half + lane % 16,
                     w[k]);
        }
      }
    }
  }
};

}  // namespace winnow::sparse_mla::backward_fused_sm90_detail
