// What the kernels share that work on given rows: which rows the entries of a query name.
//
// An entry is a column of d_scores or of the scores at indices: entry j names row indices[i,j], or
// row j where there are no indices. A tile is 64 consecutive entries. Those that name no row, or
// one that the query does not see, are absent: zeros take their place, and nothing is read for
// them.
#pragma once

#include <algorithm>
#include <cstdint>

#include <cuda_bf16.h>

#include "winnow/device/common/math.cuh"
#include "winnow/indexer/problem.h"

namespace winnow::indexer::gpu {

inline constexpr int kTileEntries = 64;

// The inputs, as kernels take them. Strides of q and k count bytes, the others elements.
struct View {
  const char *q, *k;
  const void* weights;
  const float* k_scale;           // may be null
  const std::int32_t* indices;    // may be null
  const std::int32_t* key_start;  // may be null
  const std::int32_t* key_end;    // may be null
  std::int64_t q_stride0, q_stride1, k_row_stride, weights_stride, k_scale_stride, indices_stride;
  std::int64_t key_start_stride, key_end_stride;
  std::int64_t q_start, k_stride;
  int s_q, s_k, h, columns, row_bytes;
  bool causal, weights_are_bf16, is_f8;
};

// `columns`: of indices, or s_k without them.
inline View view_of(const Problem& problem, const Rows<const std::int32_t*>& indices,
                    std::int64_t columns) {
  const std::int64_t bytes = size_of(problem.dtype);
  View view{};
  view.q = static_cast<const char*>(problem.q.data);
  view.q_stride0 = problem.q.stride0 * bytes;
  view.q_stride1 = problem.q.stride1 * bytes;
  // Copies of absent entries name row 0 and read nothing; without rows, q stands in for k.
  view.k = static_cast<const char*>(problem.s_k > 0 ? problem.k.data : problem.q.data);
  view.k_row_stride = problem.k.stride0 * bytes;
  view.weights = problem.weights.data;
  view.weights_stride = problem.weights.stride0;
  view.weights_are_bf16 = problem.weights_dtype == DType::bf16;
  view.k_scale = problem.k_scale.data;
  view.k_scale_stride = problem.k_scale.stride0;
  view.indices = indices.data;
  view.indices_stride = indices.stride0;
  view.key_start = problem.key_start.data;
  view.key_start_stride = problem.key_start.stride0;
  view.key_end = problem.key_end.data;
  view.key_end_stride = problem.key_end.stride0;
  view.causal = problem.causal;
  view.is_f8 = problem.dtype == DType::f8_e4m3;
  view.q_start = problem.q_start;
  view.k_stride = problem.k_stride;
  view.s_q = static_cast<int>(problem.s_q);
  view.s_k = static_cast<int>(problem.s_k);
  view.h = static_cast<int>(problem.h);
  view.columns = static_cast<int>(columns);
  view.row_bytes = static_cast<int>(problem.d * bytes);
  return view;
}

// The entries of a query: columns [first, first + entries), and the rows [begin, end) that it sees.
struct Entries {
  int query, first, entries;
  int begin, end;

  __device__ __forceinline__ int tiles() const { return device::ceil_div(entries, kTileEntries); }
  // The row with this index, or -1: no row that the query sees.
  __device__ __forceinline__ int row(int index) const {
    return index >= begin && index < end ? index : -1;
  }
};

__device__ __forceinline__ Entries entries_of(const View& view, int query) {
  std::int64_t begin = 0, end = view.s_k;
  if (view.key_start != nullptr) {
    begin = max(0, __ldg(view.key_start + query * view.key_start_stride));
  }
  if (view.key_end != nullptr) {
    end = min(end, std::int64_t{__ldg(view.key_end + query * view.key_end_stride)});
  }
  if (view.causal) {
    const std::int64_t tokens = view.q_start + query + 1;  // at or before the query
    end = min(end, tokens < view.k_stride ? 0 : tokens / view.k_stride);
  }
  end = max(end, std::int64_t{0});
  begin = min(begin, end);
  Entries entries{query, 0, view.columns, static_cast<int>(begin), static_cast<int>(end)};
  if (view.indices == nullptr) {
    entries.first = entries.begin;
    entries.entries = entries.end - entries.begin;
  }
  return entries;
}

// The index of an entry, which need not be a row that the query sees; -1 past the last entry. A
// thread waits for the load only where it uses the index.
__device__ __forceinline__ int index_of_entry(const View& view, const Entries& entries, int entry) {
  if (entry >= entries.entries) return -1;
  if (view.indices == nullptr) return entries.first + entry;
  return __ldg(view.indices + entries.query * view.indices_stride + entry);
}

__device__ __forceinline__ float weight_of(const View& view, int query, int head) {
  const std::int64_t at = query * view.weights_stride + head;
  return view.weights_are_bf16
             ? __bfloat162float(static_cast<const __nv_bfloat16*>(view.weights)[at])
             : __ldg(static_cast<const float*>(view.weights) + at);
}

// The factor of the scores of a row.
__device__ __forceinline__ float scale_of(const View& view, int row) {
  return view.k_scale == nullptr ? 1.0f : __ldg(view.k_scale + row * view.k_scale_stride);
}

}  // namespace winnow::indexer::gpu
