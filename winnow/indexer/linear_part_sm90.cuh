// The linear part of weighted sums with ReLU, sm90, for f8_e4m3.
//
// max(0, x) = (x + |x|) / 2, so
//   sum over heads of weight * max(0, dot(head, key))
//     = sum over heads of weight / 2 * |dot(head, key)| + dot(linear row, key),
//   linear row = sum over heads of weight / 2 * head.
// The linear row of a query makes further columns of the product on the tensor cores. The CUDA
// cores, which are the limit with f8, keep one instruction for each head and key: an absolute value
// is a modifier of its operand. Products are finite with f8_e4m3; infinite ones would meet as
// inf - inf here.
//
// A linear row is a sum of kTerms rows of f8_e4m3, term t times scale / 16^t. Each leaves at most a
// 16th of what it rounds, so that the sum is within 2^-16 of the largest that the row can be.
//
// The halves of a key without a positive product cancel but for rounding. WeightedSum looks for
// such keys, whose sums are 0.
#pragma once

#include <cstdint>

#include "winnow/device/common/arithmetic.cuh"
#include "winnow/device/common/shared.cuh"
#include "winnow/device/common/warp.cuh"
#include "winnow/device/sm90/barrier.cuh"
#include "winnow/device/sm90/chunk.cuh"

namespace winnow::indexer::sm90_detail {

inline constexpr int kLinearTerms = 4;
inline constexpr int kLinearColumns =
    8;  // of one warpgroup: the terms of two queries, or twice one's

template <class Shape>
struct LinearPart {
  // Of the terms that this lane holds of a product: columns 2 (lane % 4) + {0, 1} of the last 8.
  float scale[2];
  // Not 0 in either half if all weights are 0, as where there is no query: then sums are 0 anyway.
  std::uint32_t weightless;

  // Writes the terms of a side's queries as rows of 128 bytes behind its heads. The warpgroup calls
  // it when heads and weights are there, and nothing reads earlier terms. False if weights are so
  // large or small, or not finite, that the sums must not be split.
  __device__ __forceinline__ bool form(const float4* weights, std::uint32_t heads,
                                       std::uint32_t terms, int side) {
    constexpr int kQueries = Shape::kSideQueries;
    static_assert(kQueries * kLinearTerms <= kLinearColumns && Shape::kPanels == 1);
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    // No element of a linear row is larger than 448 times the sum of the halves of |weight|.
    const float4 own = weights[lane];
    float magnitude = fabsf(own.x) + fabsf(own.y) + fabsf(own.z) + fabsf(own.w);
#pragma unroll
    for (int step = 1; step < Shape::kHeads / 4; step *= 2) {
      magnitude += __shfl_xor_sync(device::kFullWarp, magnitude, step);
    }
    // Eight lanes hold the 32 columns of this warp, 4 each; four groups of them take turns at rows.
    const int group = lane / 8, column16 = 2 * warp + lane % 8 / 4;
    bool split = true;
    float unit_of[kQueries];
    weightless = 0;
#pragma unroll
    for (int query = 0; query < kQueries; ++query) {
      const float bound =
          224.0f * __shfl_sync(device::kFullWarp, magnitude, query * Shape::kHeads / 4);
      split = split && (bound == 0.0f || (bound >= 0x1p-60f && bound <= 0x1p100f));
      // A power of two: bound / unit lies in [128, 256).
      unit_of[query] =
          bound == 0.0f ? 1.0f : __uint_as_float(__float_as_uint(bound) & 0x7f800000u) * 0x1p-7f;
      if (lane % 4 / 2 % kQueries == query && bound == 0.0f) weightless = 0x00010001u;
    }
#pragma unroll
    for (int query = 0; query < kQueries; ++query) {
      const float unit = unit_of[query];
      float row[4] = {};
#pragma unroll 4
      for (int n = query * Shape::kHeads / 16; n < (query + 1) * Shape::kHeads / 16; ++n) {
        const float4 four = weights[4 * n + group];
        const float weight[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int head = 16 * n + 2 * group + i % 2 + i / 2 * 8;
          const std::uint32_t at = heads + device::chunk_offset(head, column16) + lane % 4 * 4;
          float value[4];
          device::unpack_f8(device::ld_shared<std::uint32_t>(at), value);
#pragma unroll
          for (int c = 0; c < 4; ++c) row[c] = fmaf(0.5f * weight[i], value[c], row[c]);
          // A head without weight makes no product positive; only this lane reads the word.
          if (split && weight[i] == 0.0f) device::st_shared(at, 0u);
        }
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        row[c] += __shfl_xor_sync(device::kFullWarp, row[c], 8);
        row[c] += __shfl_xor_sync(device::kFullWarp, row[c], 16);
        row[c] /= unit;
      }
#pragma unroll
      for (int term = 0; term < kLinearTerms; ++term) {
        const std::uint32_t rounded = device::pack_f8(row);
        if (group == term) {
#pragma unroll
          for (int at = query * kLinearTerms + term; at < kLinearColumns;
               at += kQueries * kLinearTerms) {
            device::st_shared(terms + device::chunk_offset(at, column16) + lane % 4 * 4, rounded);
          }
        }
        float value[4];
        device::unpack_f8(rounded, value);
#pragma unroll
        for (int c = 0; c < 4; ++c) row[c] = 16.0f * (row[c] - value[c]);
      }
      if (lane % 4 / 2 % kQueries == query) {
        scale[0] = unit * (lane % 2 ? 0x1p-8f : 1.0f);
        scale[1] = unit * (lane % 2 ? 0x1p-12f : 0x1p-4f);
      }
    }
    device::fence_proxy_async_shared();
    device::bar_sync<128>(1 + side);
    return split;
  }

  // Adds the linear parts to sums that are shared by lanes two apart: the upper ones hold the
  // second of two queries, or the second of one query's two rows.
  template <int kColumns, int kSums>
  __device__ __forceinline__ void add(const float (&product)[kColumns], float (&sum)[kSums]) const {
    const float* const terms = product + kColumns - 4;
    if constexpr (kSums == 2) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        sum[r] = fmaf(scale[0], terms[2 * r], fmaf(scale[1], terms[2 * r + 1], sum[r]));
      }
    } else {
      const bool upper = threadIdx.x % 32 & 2;
      sum[0] = fmaf(scale[0], upper ? terms[2] : terms[0],
                    fmaf(scale[1], upper ? terms[3] : terms[1], sum[0]));
    }
  }
};

}  // namespace winnow::indexer::sm90_detail
