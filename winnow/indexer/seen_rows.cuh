// Which rows the queries of a call see, for the kernels of all GPUs.
#pragma once

#include <cstdint>

#include "winnow/core/row_limits.h"
#include "winnow/device/common/warp.cuh"
#include "winnow/indexer/problem.h"

namespace winnow::indexer::gpu {

// Which rows the queries see.
struct SeenRows {
  const std::int32_t* key_start;  // [s_q], or null
  const std::int32_t* key_end;    // [s_q], or null
  std::int64_t key_start_stride, key_end_stride;
  std::int64_t q_start, k_stride;
  int causal;
  int s_q, s_k;
  int width;  // of scores from each query's first row on; see kFromStart
};

inline SeenRows seen_rows(const Problem& problem) {
  SeenRows seen{};
  seen.key_start = problem.key_start.data;
  seen.key_start_stride = problem.key_start.stride0;
  seen.key_end = problem.key_end.data;
  seen.key_end_stride = problem.key_end.stride0;
  seen.causal = problem.causal;
  seen.q_start = problem.q_start;
  seen.k_stride = problem.k_stride;
  seen.s_q = static_cast<int>(problem.s_q);
  seen.s_k = static_cast<int>(problem.s_k);
  return seen;
}

// Rows [begin, end) that a query sees; begin <= end.
struct RowRange {
  int begin, end;
};

// The first row of a query as key_start gives it, which may be no row of the keys.
__device__ __forceinline__ int first_row(const SeenRows& p, int query) {
  return __ldg(p.key_start + query * p.key_start_stride);
}
// kFromStart: scores begin with the first row, which is given, and there are p.width of them; a
// query sees none of the rows behind.
template <bool kFromStart = false>
__device__ __forceinline__ RowRange visible_rows(const SeenRows& p, int query) {
  std::int64_t begin = 0, end = p.s_k;
  if (p.key_start != nullptr) begin = __ldg(p.key_start + query * p.key_start_stride);
  if constexpr (kFromStart) end = min(end, begin + p.width);
  if (p.key_end != nullptr) {
    end = min(end, static_cast<std::int64_t>(__ldg(p.key_end + query * p.key_end_stride)));
  }
  if (p.causal) end = min(end, causal_rows(p.q_start, p.k_stride, query));
  const winnow::RowRange rows = row_range(begin, end);
  return {static_cast<int>(rows.begin), static_cast<int>(rows.end)};
}

// The least range of rows that has what some of up to 32 queries see, but for rows in front that
// make its begin a multiple of 4; its end may be 0 where nothing is seen. All lanes of a warp call
// it.
struct SeenRange {
  unsigned begin, end;
};
template <bool kFromStart = false>
__device__ __forceinline__ SeenRange seen_by_queries(const SeenRows& p, int first_query,
                                                     int queries) {
  const int lane = threadIdx.x % 32, query = first_query + lane;
  RowRange rows = {INT32_MAX, 0};
  if (lane < queries && query < p.s_q) {
    rows = visible_rows<kFromStart>(p, query);
    if (rows.begin == rows.end) rows = {INT32_MAX, 0};
  }
  return {__reduce_min_sync(device::kFullWarp, static_cast<unsigned>(rows.begin)) / 4 * 4,
          __reduce_max_sync(device::kFullWarp, static_cast<unsigned>(rows.end))};
}

// The rows of the tiles that have what some queries see, from the first that is seen on; none begin
// and end at 0. All lanes of a warp call it.
template <bool kFromStart = false>
__device__ __forceinline__ SeenRange scored_rows(const SeenRows& p, int first_query, int queries,
                                                 unsigned tile_rows) {
  const SeenRange seen = seen_by_queries<kFromStart>(p, first_query, queries);
  if (seen.end <= seen.begin) return {0, 0};
  return {seen.begin, seen.begin + (seen.end - seen.begin + tile_rows - 1) / tile_rows * tile_rows};
}

// Stores -inf in scores [from, end) of a query, from a multiple of 4 on: part `part` of `parts`, by
// a warp. `aligned`: every row of scores to 16 bytes.
__device__ inline void store_unseen(float* scores, std::int64_t from, std::int64_t end,
                                    bool aligned, int part, int parts) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  for (std::int64_t row = from + 128 * part + 4 * lane; row < end; row += 128 * parts) {
    if (aligned && row + 4 <= end) {
      const float unseen = device::negative_infinity();
      *reinterpret_cast<float4*>(scores + row) = make_float4(unseen, unseen, unseen, unseen);
    } else {
      for (std::int64_t e = row; e < min(row + 4, end); ++e) {
        scores[e] = device::negative_infinity();
      }
    }
  }
}

// The same in the rows of a query's scores that are not in [begin, end) of `scored`, which are
// multiples of 4.
__device__ inline void store_unseen(const SeenRows& p, SeenRange scored, float* scores,
                                    bool aligned, int part, int parts) {
  store_unseen(scores, 0, scored.begin, aligned, part, parts);
  store_unseen(scores, scored.end, p.s_k, aligned, part, parts);
}

// The same of scores that begin with row `start`, whatever that is.
__device__ inline void store_unseen_from(const SeenRows& p, std::int64_t start, SeenRange scored,
                                         float* scores, bool aligned, int part, int parts) {
  const std::int64_t width = p.width;
  const auto column = [&](std::int64_t row) {
    return min(max(row - start, std::int64_t{0}), width);
  };
  const std::int64_t behind = column(scored.end), even = min((behind + 3) / 4 * 4, width);
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (part == 0 && behind + lane < even) scores[behind + lane] = device::negative_infinity();
  store_unseen(scores, 0, column(scored.begin), aligned, part, parts);
  store_unseen(scores, even, width, aligned, part, parts);
}

}  // namespace winnow::indexer::gpu
