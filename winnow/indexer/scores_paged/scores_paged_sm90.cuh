// How the kernel of topk_paged_sm90.cuh stores scores for scores_paged, sm90.
#pragma once

#include "winnow/indexer/topk_paged/topk_paged_sm90.cuh"

namespace winnow::indexer::sm90_detail {

inline constexpr int kRestColumns = 8192;  // columns that a warp fills at a time

struct PagedScores {
  static constexpr bool kDense = true;
  float* scores;  // [b, s_q, columns]
  std::int64_t stride0, stride1;
  int columns;
  bool clean;    // fill the columns behind the rows that a query sees with -inf
  bool aligned;  // every row of `scores` is aligned to 16 bytes
  // If the cache has no pages, and so no tiles: the entries in a row of block_tables; else 0.
  int absent_table;

  // The scores of the first query of a group.
  __device__ float* of_group(const PageLine& line, int group) const {
    const QueryGroup queries = query_group(line, group);
    return scores + queries.sequence * stride0 + queries.first * stride1;
  }

  // Stores the score of one row for a query that sees the first `seen` rows.
  __device__ void store(float* of_group, int query, int row, bool visible, float score,
                        int seen) const {
    if (row >= (clean ? columns : min(seen, columns))) return;
    of_group[query * stride1 + row] =
        visible && row < seen ? score + 0.0f : device::negative_infinity();
  }

  // Stores -inf behind the last tile of every group. With `clean` it fills up to the last column.
  // Without, it fills only if the cache has no pages, up to the last row that a query sees. One
  // warp of each block calls it. `rows`: for each group, the most rows that a query of it sees.
  __device__ void store_rest(const PageLine& line, const std::int32_t* rows) const {
    if (!clean && absent_table == 0) return;
    PageLine seen = line;
    seen.table = absent_table;
    const std::int64_t parts = device::ceil_div(std::int64_t{columns}, std::int64_t{kRestColumns});
    const std::int64_t items = std::int64_t{line.groups} * line.queries * parts;
    const float rest = device::negative_infinity();
    for (std::int64_t item = blockIdx.x; item < items; item += gridDim.x) {
      const int place = static_cast<int>(item / parts), query = place % line.queries;
      const int group = place / line.queries;
      const QueryGroup queries = query_group(line, group);
      if (query >= queries.count) continue;
      const std::int64_t part = item % parts * kRestColumns;
      const std::int64_t behind = device::ceil_div(rows[group], kPagedTileRows) * kPagedTileRows;
      std::int64_t end = min(part + kRestColumns, std::int64_t{columns});
      if (!clean) {
        const int visible = rows_of_query(seen, queries.sequence, queries.first + query);
        end = min(end, std::int64_t{visible});
      }
      float* const out = of_group(line, group) + query * stride1;
      for (std::int64_t at = max(part, behind) + 4 * (threadIdx.x % 32); at < end; at += 4 * 32) {
        if (aligned && at + 4 <= end) {
          *reinterpret_cast<float4*>(out + at) = make_float4(rest, rest, rest, rest);
        } else {
          for (std::int64_t e = at; e < min(at + 4, end); ++e) out[e] = rest;
        }
      }
    }
  }
};

}  // namespace winnow::indexer::sm90_detail
