// The choice from the stored keys of a paged cache: what choose.cuh chooses from.
#pragma once

#include <cstdint>

#include "winnow/indexer/topk/choose.cuh"
#include "winnow/indexer/topk_paged/page_line.cuh"
#include "winnow/indexer/topk_paged/topk_paged_impl.h"

namespace winnow::indexer::gpu {

// Query n of the launch is query first_query + n of [b, s_q], counted from sequence first_sequence
// on.
struct PagedChooseParams {
  static constexpr bool kKeys = true;
  PageLine line;
  std::int64_t first_sequence;
  unsigned first_query;
  const std::uint32_t* stored;  // [group of the launch][stored_queries][stored_stride]
  std::int64_t stored_stride;
  int stored_queries;
  const std::int32_t* block_tables;  // [b, table]
  std::int64_t block_tables_stride;
  int num_pages, positions;
  std::int32_t* indices;  // [b, s_q, topk]
  std::int32_t* length;   // [b, s_q]
  float* scores;          // [b, s_q, topk], or null
  std::int64_t indices_stride0, indices_stride1, length_stride0, length_stride1;
  std::int64_t scores_stride0, scores_stride1;
  int topk, later_ties, blocks;

  __device__ std::int64_t sequence(int query) const {
    return first_sequence + (first_query + query) / static_cast<unsigned>(line.s_q);
  }
  __device__ int place(int query) const {
    return static_cast<int>((first_query + query) % static_cast<unsigned>(line.s_q));
  }
  __device__ RowRange rows_of(int query) const { return {0, visible_to(query)}; }
  __device__ int visible_to(int query) const {
    return rows_of_query(line, sequence(query), place(query));
  }
  __device__ const std::uint32_t* stored_of(int query) const {
    const int j = place(query);
    const std::int64_t group = (sequence(query) - line.first_sequence) * line.groups_of_a_sequence +
                               j / line.queries - line.first_group;
    return stored + (group * stored_queries + j % line.queries) * stored_stride;
  }
  __device__ std::int32_t* indices_of(int query) const {
    return indices + sequence(query) * indices_stride0 + place(query) * indices_stride1;
  }
  __device__ std::int32_t* length_of(int query) const {
    return length + sequence(query) * length_stride0 + place(query) * length_stride1;
  }
  __device__ float* scores_of(int query) const {
    if (scores == nullptr) return nullptr;
    return scores + sequence(query) * scores_stride0 + place(query) * scores_stride1;
  }
  // The slots of rows; -1 where another has taken the page out of the table since.
  struct Slots {
    const std::int32_t* table;  // null: positions are wanted
    int num_pages, rows;
    __device__ std::int32_t of_four(int row) const {
      if (table == nullptr) return row;
      if (row >= rows) return -1;  // entries behind the context are not read
      const std::int32_t page = __ldg(table + row / kPagedPageRows);
      if (page < 0 || page >= num_pages) return -1;
      return page * kPagedPageRows + row % kPagedPageRows;
    }
    __device__ static std::int32_t behind(std::int32_t first, int e) {
      return first < 0 ? -1 : first + e;
    }
  };
  __device__ Slots index_of(int query) const {
    return {positions ? nullptr : block_tables + sequence(query) * block_tables_stride, num_pages,
            visible_to(query)};
  }
};

// All but what is stored, the line and the first query of a launch.
inline PagedChooseParams paged_choose_params(const TopkPagedParams& params) {
  PagedChooseParams choose{};
  choose.block_tables = params.block_tables.data;
  choose.block_tables_stride = params.block_tables.stride0;
  choose.num_pages = static_cast<int>(params.num_pages);
  choose.positions = params.positions;
  choose.indices = params.indices.data;
  choose.indices_stride0 = params.indices.stride0;
  choose.indices_stride1 = params.indices.stride1;
  choose.length = params.length.data;
  choose.length_stride0 = params.length.stride0;
  choose.length_stride1 = params.length.stride1;
  choose.scores = params.scores.data;
  choose.scores_stride0 = params.scores.stride0;
  choose.scores_stride1 = params.scores.stride1;
  choose.topk = static_cast<int>(params.topk);
  choose.later_ties = params.later_ties;
  return choose;
}

}  // namespace winnow::indexer::gpu
