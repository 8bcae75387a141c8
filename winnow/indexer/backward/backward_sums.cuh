// What the kernels of backward share: their parameters, and what comes before and after them.
//
// The deterministic mode adds integers, whose sum has no order: 64 bits for each number, scaled by
// a power of two for each row. Before, bound_kernel finds the largest addend that a row can meet.
//
// Kernels are static, as one that objects of several architectures have would be the same to the
// linker.
#pragma once

#include <cstdint>

#include "winnow/device/common/arithmetic.cuh"
#include "winnow/device/common/math.cuh"
#include "winnow/device/common/shared.cuh"
#include "winnow/device/sm80/tile.cuh"
#include "winnow/indexer/chosen.cuh"

namespace winnow::indexer::gpu {

using namespace winnow::device;

inline constexpr int kBlockHeads = 64;  // of an item

struct Params {
  View view;
  const float* d_scores;  // [s_q, columns]
  std::int64_t d_scores_stride;
  char *dq, *d_weights;
  std::int64_t dq_stride0, dq_stride1, d_weights_stride;  // elements
  bool dq_f32, d_weights_f32;
  float* dk;  // f32 sums, [s_k, d]
  std::int64_t dk_stride;
  // Of the deterministic mode.
  unsigned* bounds;           // [s_k], f32 bits
  float* scales;              // [s_k]
  unsigned long long* fixed;  // [s_k, d]
  int headroom;               // bits that the number of addends may take
  unsigned head_blocks, items;
};

// The largest addend that each row can meet: |d_score * k_scale| times the largest column of
// sum over heads of |weight * q|. NumberOf::of(view, row, column) is the number in a column of a
// row of q. Bits of numbers above 0 are ordered as they are, NaN behind them.
inline constexpr int kBoundThreads = 256;
template <class NumberOf>
static __global__ void __launch_bounds__(kBoundThreads, 4)
    bound_kernel(const __grid_constant__ Params p, int d) {
  WINNOW_BLOCK_SHARED(sums, float[kBoundThreads]);
  WINNOW_BLOCK_SHARED(largest, unsigned);
  const View& view = p.view;
  const int column = threadIdx.x % d, part = threadIdx.x / d, parts = kBoundThreads / d;
  for (int query = blockIdx.x; query < view.s_q; query += gridDim.x) {
    const Entries entries = entries_of(view, query);
    if (entries.begin == entries.end) continue;
    float sum = 0.0f;
    for (int head = part; head < view.h; head += parts) {
      const char* const q = view.q + query * view.q_stride0 + head * view.q_stride1;
      sum += fabsf(weight_of(view, query, head) * NumberOf::of(view, q, column));
    }
    if (threadIdx.x == 0) largest = 0;
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (part == 0) {
      for (int other = 1; other < parts; ++other) sum += sums[other * d + column];
      atomicMax(&largest, __float_as_uint(sum) & 0x7fffffffu);
    }
    __syncthreads();
    const float of_query = __uint_as_float(largest);
    for (int entry = threadIdx.x; entry < entries.entries; entry += kBoundThreads) {
      const int row = entries.row(index_of_entry(view, entries, entry));
      if (row < 0) continue;
      const float d_score = __ldg(p.d_scores + query * p.d_scores_stride + entries.first + entry);
      atomicMax(p.bounds + row, __float_as_uint(fabsf(d_score * scale_of(view, row) * of_query)));
    }
    __syncthreads();
  }
}

// The scale of each row, with which no sum leaves 63 bits. A row that can meet what is not finite
// gets NaN.
static __global__ void scale_kernel(const __grid_constant__ Params p) {
  const std::int64_t row = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x;
  if (row >= p.view.s_k) return;
  // A hundredth more: for what rounding adds.
  const float bound = 1.01f * __uint_as_float(p.bounds[row]);
  float scale = 1.0f;  // nothing is added
  if (bound > 0) {
    int exponent;
    frexpf(bound, &exponent);  // bound < 2^exponent
    scale = ldexpf(1.0f, min(62 - p.headroom - exponent, 126));
  }
  if (!(bound < infinity())) scale = __uint_as_float(0x7fc00000u);
  p.scales[row] = scale;
}

struct FinishParams {
  const float* sums;                // [s_k, d]; null in the deterministic mode:
  const unsigned long long* fixed;  // [s_k, d]
  const float* scales;              // [s_k]
  char* dk;
  std::int64_t dk_stride;  // elements
  std::int64_t quads;      // s_k * d / 4
  int row_quads;           // d / 4
  bool f32;
};

// dk from the sums in the workspace, in f32 or kNarrow, four columns a thread.
inline constexpr int kFinishThreads = 256;
template <DType kNarrow>
static __global__ void __launch_bounds__(kFinishThreads)
    finish_kernel(const __grid_constant__ FinishParams p) {
  for (std::int64_t n = std::int64_t{blockIdx.x} * kFinishThreads + threadIdx.x; n < p.quads;
       n += std::int64_t{gridDim.x} * kFinishThreads) {
    const std::int64_t row = n / p.row_quads, at = row * p.dk_stride + n % p.row_quads * 4;
    float v[4];
    if (p.sums != nullptr) {
      const float4 sums = __ldcs(reinterpret_cast<const float4*>(p.sums) + n);
      v[0] = sums.x, v[1] = sums.y, v[2] = sums.z, v[3] = sums.w;
    } else {
      const float unit = 1.0f / p.scales[row];  // exact: a power of two
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        v[i] = __ll2float_rn(static_cast<long long>(p.fixed[4 * n + i])) * unit;
      }
    }
    if (p.f32) {
      *reinterpret_cast<float4*>(reinterpret_cast<float*>(p.dk) + at) =
          make_float4(v[0], v[1], v[2], v[3]);
    } else {
      *reinterpret_cast<uint2*>(p.dk + 2 * at) =
          make_uint2(pack_pair<kNarrow>(v[0], v[1]), pack_pair<kNarrow>(v[2], v[3]));
    }
  }
}

}  // namespace winnow::indexer::gpu
