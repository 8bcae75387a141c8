// Top-k sparse MLA attention, backward, sm90: the kernels before and after the fused one.
//
//   prepare_kernel   the valid entries of every query's lists, ordered by key range; zeros in the
//                    accumulator; delta = dot(out, d_out) where topk is too short for the
//                    fused kernel to hide it, or unknown: three kinds of blocks side by side
//   (products)       backward_fused_sm90.cuh: dq, the f32 accumulator of dkv, shares of d_sink
//   finish_kernel    the accumulator's columns in order, in the dtype of dkv
//   sink_kernel      d_sink, summed over the queries
//
// The order of a query's entries changes no result but the last bits, and much of the speed: blocks
// that start together walk through the cache together, so that a row read or added to by one is
// still in L2 when the next wants it, however large the cache.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>

#include "winnow/device/common/math.cuh"
#include "winnow/device/common/shared.cuh"
#include "winnow/device/common/warp.cuh"
#include "winnow/sparse_mla/backward/backward_sources_sm90.cuh"
#include "winnow/sparse_mla/gather_sm90.cuh"

namespace winnow::sparse_mla::backward_fused_sm90_detail {

using namespace winnow::device;

inline constexpr int kPrepareThreads = 256;

struct DeltaParams {
  const char *out, *d_out;  // bf16; strides count bytes
  std::int64_t out_stride0, out_stride1, d_out_stride0, d_out_stride1;
  float* delta;       // [rows]
  std::int64_t rows;  // s_q * h_q
  int h_q;
};

// A warp takes one (query, head).
inline constexpr int kDeltaRows = kPrepareThreads / 32;  // of a block
__device__ __forceinline__ void compute_delta(const DeltaParams& p, std::int64_t block) {
  const std::int64_t row = block * kDeltaRows + threadIdx.x / 32;
  if (row >= p.rows) return;
  const int lane = threadIdx.x % 32;
  const std::int64_t query = row / p.h_q, head = row % p.h_q;
  const auto* out =
      reinterpret_cast<const uint4*>(p.out + query * p.out_stride0 + head * p.out_stride1);
  const auto* d_out =
      reinterpret_cast<const uint4*>(p.d_out + query * p.d_out_stride0 + head * p.d_out_stride1);
  const uint4 a0 = __ldg(out + lane), a1 = __ldg(out + lane + 32);
  const uint4 b0 = __ldg(d_out + lane), b1 = __ldg(d_out + lane + 32);
  const float sum = warp_sum(dot_bf16x8(a0, b0) + dot_bf16x8(a1, b1));
  if (lane == 0) p.delta[row] = sum;
}

struct OrderParams {
  GatherView rows;        // of two sources topk alone, the entries of both lists
  std::int32_t* ordered;  // [s_q, topk]
  std::int32_t* lengths;  // [s_q]
  int shift;              // index >> shift is its range, below kRanges
};

inline constexpr int kRanges = kPrepareThreads;
inline constexpr int kStaged = 4096;  // entries that are put in order in shared memory

// Calls use(row) for the valid ones of the query's entries, each thread for some of them.
template <class List, class Use>
__device__ __forceinline__ void for_each_entry(const List& list, int entries, const Use& use) {
  constexpr int kBatch = 8;  // loads under way
  const auto load = list.loads();
  const std::uint32_t visible = list.visible();
  for (int first = threadIdx.x; first < entries; first += kBatch * kPrepareThreads) {
    std::int32_t index[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int entry = first + i * kPrepareThreads;
      index[i] = entry < entries ? load(entry) : -1;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (static_cast<std::uint32_t>(index[i]) < visible) use(index[i]);
    }
  }
}

// Counts the valid entries in every range, then puts each in its place. One block a query, which
// has `others` entries beside these.
template <class List>
__device__ __forceinline__ void order_entries(const OrderParams& p, std::int64_t query,
                                              const List& list, int others) {
  WINNOW_BLOCK_SHARED(place, int[kRanges]);
  WINNOW_BLOCK_SHARED(warp_totals, int[kPrepareThreads / 32]);
  WINNOW_BLOCK_SHARED(staged, std::int32_t[kStaged]);
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int entries = list.count();
  place[thread] = 0;
  __syncthreads();
  for_each_entry(list, entries,
                 [&](std::int32_t index) { atomicAdd(&place[index >> p.shift], 1); });
  __syncthreads();
  const int count = place[thread];
  int sum = warp_prefix(count, lane);  // of the ranges up to this one
  if (lane == 31) warp_totals[warp] = sum;
  __syncthreads();
  int total = 0;
#pragma unroll
  for (int w = 0; w < kPrepareThreads / 32; ++w) {
    if (w < warp) sum += warp_totals[w];
    total += warp_totals[w];
  }
  place[thread] = sum - count;
  if (thread == 0) p.lengths[query] = others + total;
  __syncthreads();
  // Written side by side, where they fit.
  std::int32_t* const ordered = p.ordered + query * p.rows.topk;
  std::int32_t* const to = entries <= kStaged ? staged : ordered;
  // A list that is rewritten meanwhile may have more in a range now.
  const int room = entries <= kStaged ? kStaged : static_cast<int>(p.rows.topk);
  for_each_entry(list, entries, [&](std::int32_t index) {
    const int at = atomicAdd(&place[index >> p.shift], 1);
    if (at < room) to[at] = index;
  });
  if (to == ordered) return;
  __syncthreads();
  for (int i = thread; i < total; i += kPrepareThreads) ordered[i] = staged[i];
}

// Of two sources or of ranges.
__device__ __forceinline__ void order_sources(const OrderParams& p, const SourcesParams& sources,
                                              std::int64_t query) {
  const QueryRanges ranges = ranges_of(sources, query);
  if (sources.ranges != nullptr && threadIdx.x == 0) sources.ranges[query] = ranges;
  order_entries(p, query, ListedEntries{sources, query}, ranges.rows());
}

struct PrepareParams {
  OrderParams order;
  DeltaParams delta;
  float4* zeros;
  std::int64_t zero_count;
  unsigned order_blocks, delta_blocks, zero_blocks;
};

template <class Order>
__device__ __forceinline__ void prepare(const PrepareParams& p, const Order& order) {
  unsigned block = blockIdx.x;
  if (block < p.order_blocks) return order(block);
  block -= p.order_blocks;
  if (block < p.delta_blocks) return compute_delta(p.delta, block);
  block -= p.delta_blocks;
  for (std::int64_t i = std::int64_t{block} * kPrepareThreads + threadIdx.x; i < p.zero_count;
       i += std::int64_t{p.zero_blocks} * kPrepareThreads) {
    p.zeros[i] = {0.0f, 0.0f, 0.0f, 0.0f};
  }
}

static __global__ void __launch_bounds__(kPrepareThreads)
    prepare_kernel(const __grid_constant__ PrepareParams p) {
  prepare(p, [&](std::int64_t query) {
    order_entries(p.order, query, OneList{p.order.rows, query}, 0);
  });
}
static __global__ void __launch_bounds__(kPrepareThreads)
    prepare_sources_kernel(const __grid_constant__ PrepareParams p,
                           const __grid_constant__ SourcesParams sources) {
  prepare(p, [&](std::int64_t query) { order_sources(p.order, sources, query); });
}

struct FinishParams {
  const float* accumulator;  // [s_kv, columns], permuted (accumulator_column())
  char* dkv;                 // [s_kv, columns] f32 or bf16
  std::int64_t dkv_stride;   // bytes
  std::int64_t quads;        // s_kv * columns / 4
  int row_quads;             // columns / 4
  bool f32;
};

// A thread takes 4 floats of the accumulator, columns c, c + 1, c + 8, c + 9 of a row.
inline constexpr int kFinishThreads = 256;
static __global__ void __launch_bounds__(kFinishThreads) finish_kernel(const FinishParams p) {
  for (std::int64_t n = std::int64_t{blockIdx.x} * kFinishThreads + threadIdx.x; n < p.quads;
       n += std::int64_t{gridDim.x} * kFinishThreads) {
    const float4 v = __ldcs(reinterpret_cast<const float4*>(p.accumulator) + n);
    const std::int64_t row = n / p.row_quads;
    const int quad = static_cast<int>(n % p.row_quads);
    const int column = quad / 4 * 16 + quad % 4 * 2;
    char* const to = p.dkv + row * p.dkv_stride + column * (p.f32 ? 4 : 2);
    if (p.f32) {
      *reinterpret_cast<float2*>(to) = {v.x, v.y};
      *reinterpret_cast<float2*>(to + 32) = {v.z, v.w};
    } else {
      *reinterpret_cast<std::uint32_t*>(to) = pack_bf16(v.x, v.y);
      *reinterpret_cast<std::uint32_t*>(to + 16) = pack_bf16(v.z, v.w);
    }
  }
}

// d_sink[h] = sum of share[i, h] over the queries, in a fixed order. A block has 32 heads.
inline constexpr int kSinkThreads = 1024;
static __global__ void __launch_bounds__(kSinkThreads)
    sink_kernel(const float* share, std::int64_t s_q, int h_q, float* d_sink,
                std::int64_t d_sink_stride) {
  WINNOW_BLOCK_SHARED(sums, double[32][33]);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int head = blockIdx.x * 32 + lane;
  double sum = 0.0;
  if (head < h_q) {
#pragma unroll 8
    for (std::int64_t i = warp; i < s_q; i += 32) sum += __ldg(share + i * h_q + head);
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || head >= h_q) return;
  for (int w = 1; w < 32; ++w) sum += sums[w][lane];
  d_sink[head * d_sink_stride] = static_cast<float>(sum);
}

}  // namespace winnow::sparse_mla::backward_fused_sm90_detail
