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

__device__ __forceinline__ RowRange visible_rows(const SeenRows& p, int query) {
  std::int64_t begin = 0, end = p.s_k;
  if (p.key_start != nullptr) begin = __ldg(p.key_start + query * p.key_start_stride);
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
__device__ __forceinline__ SeenRange seen_by_queries(const SeenRows& p, int first_query,
                                                     int queries) {
  const int lane = threadIdx.x % 32, query = first_query + lane;
  RowRange rows = {INT32_MAX, 0};
  if (lane < queries && query < p.s_q) {
    rows = visible_rows(p, query);
    if (rows.begin == rows.end) rows = {INT32_MAX, 0};
  }
  return {__reduce_min_sync(device::kFullWarp, static_cast<unsigned>(rows.begin)) / 4 * 4,
          __reduce_max_sync(device::kFullWarp, static_cast<unsigned>(rows.end))};
}

// The rows of the tiles that have what some queries see, from the first that is seen on; none begin
// and end at 0. All lanes of a warp call it.
__device__ __forceinline__ SeenRange scored_rows(const SeenRows& p, int first_query, int queries,
                                                 unsigned tile_rows) {
  const SeenRange seen = seen_by_queries(p, first_query, queries);
  if (seen.end <= seen.begin) return {0, 0};
  return {seen.begin, seen.begin + (seen.end - seen.begin + tile_rows - 1) / tile_rows * tile_rows};
}

// Stores -inf in the rows of a query's scores that are not in [begin, end) of `scored`: part `part`
// of `parts`, by a warp. `begin` and `end` are multiples of 4; `aligned`: every row of
// scores to 16 bytes.
__device__ inline void store_unseen(const SeenRows& p, SeenRange scored, float* scores,
                                    bool aligned, int part, int parts) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const auto store = [&](std::int64_t from, std::int64_t end) {
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
  };
  store(0, scored.begin);
  store(scored.end, p.s_k);
}

}  // namespace winnow::indexer::gpu
