// Which rows a query sees, for the sparse MLA kernels of every GPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "winnow/core/row_limits.h"
#include "winnow/sparse_mla/problem.h"

namespace winnow::sparse_mla {

// The cache and the choice of rows, as kernels take them. Strides of kv count bytes, the others
// elements.
struct GatherView {
  const char* kv;
  std::int64_t kv_stride;
  const std::int32_t* indices;
  std::int64_t indices_stride;
  const std::int32_t* topk_length;  // may be null
  std::int64_t topk_length_stride;
  std::int64_t s_kv, q_start, k_stride;
  std::int32_t topk;
  bool causal;
};

// Of a source of the problem. Its topk must fit in 31 bits.
inline GatherView gather_view(const Source& source, const Problem& problem) {
  GatherView view;
  // Copies of invalid entries name row 0 and read nothing; without rows, q stands in for kv.
  view.kv = static_cast<const char*>(source.s_kv > 0 ? source.kv.data : problem.q.data);
  view.kv_stride = source.kv.stride0 * 2;
  view.indices = source.indices.data;
  view.indices_stride = source.indices.stride0;
  view.topk_length = source.topk_length.data;
  view.topk_length_stride = source.topk_length.stride0;
  view.s_kv = source.s_kv;
  view.q_start = source.q_start;
  view.k_stride = source.k_stride;
  view.topk = static_cast<std::int32_t>(source.topk);
  view.causal = source.causal;
  return view;
}
inline GatherView gather_view(const Problem& problem) { return gather_view(problem, problem); }

// Entries of the query that count.
__device__ __forceinline__ int query_entries(const GatherView& view, std::int64_t query) {
  if (view.topk_length == nullptr) return view.topk;
  return min(max(__ldg(view.topk_length + query * view.topk_length_stride), 0), view.topk);
}

// Rows t < visible_rows() may be seen by the query (Problem::visible_rows). At most 2^31, so that
// the unsigned comparison in a tile rejects negative indices too.
__device__ __forceinline__ std::uint32_t visible_rows(const GatherView& view, std::int64_t query) {
  std::int64_t rows = view.s_kv;
  if (view.causal) {
    rows = min(rows, causal_rows(view.q_start, view.k_stride, query));
  }
  return static_cast<std::uint32_t>(min(rows, std::int64_t{1} << 31));
}

// The ranges of a dense problem, beside its GatherView.
struct RangeView {
  const std::int32_t* key_start;
  std::int64_t key_start_stride;
  const std::int32_t* key_end;
  std::int64_t key_end_stride;
};

inline RangeView range_view(const Source& source) {
  return {source.key_start.data, source.key_start.stride0, source.key_end.data,
          source.key_end.stride0};
}

// The rows that a query of a dense problem sees.
struct QueryRange {
  int begin, end;
};
__device__ __forceinline__ QueryRange query_range(const GatherView& view, const RangeView& ranges,
                                                  std::int64_t query) {
  const std::int64_t rows = visible_rows(view, query);
  const std::int64_t end = __ldg(ranges.key_end + query * ranges.key_end_stride);
  const RowRange range =
      row_range(__ldg(ranges.key_start + query * ranges.key_start_stride), min(end, rows));
  return {static_cast<int>(range.begin), static_cast<int>(range.end)};
}

}  // namespace winnow::sparse_mla
