// The parameters and the shape of a launch of topk_paged_sm90.cuh. Host code of .cu files.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "winnow/device/sm90/tensor_map.h"
#include "winnow/indexer/quantize/quantize.h"
#include "winnow/indexer/topk_paged/paged_problem.h"
#include "winnow/indexer/topk_paged/topk_paged_sm90.cuh"

namespace winnow::indexer::sm90_detail {

template <class Shape>
std::int64_t groups_of_a_sequence(const PagedProblem& problem) {
  return (problem.s_q + Shape::kQueries - 1) / Shape::kQueries;
}

// Sets the tensor map of the pages. Its strides must be positive: with a negative stride the map
// begins at the last page.
template <class Params>
void describe_pages(const device::Runtime& runtime, const PagedProblem& problem, Params& p) {
  const std::int64_t stride = problem.pages.stride0;
  const bool many = problem.num_pages > 1 && stride != 0;
  p.map_step = !many ? 0 : stride > 0 ? 1 : -1;
  p.map_first = p.map_step < 0 ? static_cast<int>(problem.num_pages - 1) : 0;
  if (problem.num_pages == 0) return;
  const auto d = static_cast<std::uint64_t>(problem.d);
  const std::uint32_t rows = kPagedPageRows + static_cast<std::uint32_t>(4 * kPagedPageRows / d);
  p.loaded_bytes = static_cast<int>(rows * kPanelRowBytes);
  // Columns beyond d read as zeros.
  const device::MapDim dims[] = {
      {d, 0, kPanelRowBytes},
      {rows, d, rows},
      {many ? static_cast<std::uint64_t>(problem.num_pages) : 1,
       static_cast<std::uint64_t>(many ? std::abs(stride) : page_bytes(problem.d)), 1}};
  p.pages =
      device::tensor_map(runtime, CU_TENSOR_MAP_DATA_TYPE_UINT8,
                         problem.pages.data + (p.map_step < 0 ? p.map_first * stride : 0), dims);
}

// Sets all parameters but `stored` and the groups of a launch.
template <class Shape, class Params>
void describe(const device::Runtime& runtime, const PagedProblem& problem, Params& p) {
  describe_pages(runtime, problem, p);
  p.q = static_cast<const std::uint8_t*>(problem.q.data);
  p.q_stride0 = problem.q.stride0;
  p.q_stride1 = problem.q.stride1;
  p.q_head_stride = problem.q_head_stride;
  p.weights = problem.weights.data;
  p.weights_stride0 = problem.weights.stride0;
  p.weights_stride1 = problem.weights.stride1;
  p.weights_are_bf16 = problem.weights_dtype == DType::bf16;
  p.block_tables = problem.block_tables.data;
  p.block_tables_stride = problem.block_tables.stride0;
  p.h = static_cast<int>(problem.h);
  p.d = static_cast<int>(problem.d);
  p.num_pages = static_cast<int>(problem.num_pages);
  p.line.context_lens = problem.context_lens.data;
  p.line.context_stride = problem.context_lens.stride0;
  p.line.of_queries = problem.lens_of_queries;
  p.line.groups_of_a_sequence = static_cast<int>(groups_of_a_sequence<Shape>(problem));
  p.line.queries = Shape::kQueries;
  p.line.s_q = problem.s_q;
  p.line.table = problem.num_pages == 0 ? 0 : static_cast<int>(problem.table);
}

// Calls function(Shape()) with the shape for the heads, which are padded to 16, 32, 64 or 128, and
// the fewest columns that hold all queries; fewer where a group of more than `most` queries would
// have no room for its results.
template <int kHeads, class Function>
void with_columns(std::int64_t s_q, std::int64_t most, const Function& function) {
  const auto enough = [&](auto shape, auto more) {
    return s_q <= decltype(shape)::kQueries ||
           std::min<std::int64_t>(s_q, decltype(more)::kQueries) > most;
  };
  using Narrow = PagedShape<kHeads, kHeads <= 64 ? 64 : 128>;
  using Middle = PagedShape<kHeads, 128>;
  using Wide = PagedShape<kHeads, 256>;
  if (kHeads <= 64 && enough(Narrow(), Middle())) return function(Narrow());
  if (enough(Middle(), Wide())) return function(Middle());
  return function(Wide());
}
template <class Function>
void with_paged_shape(const PagedProblem& problem, std::int64_t most, const Function& function) {
  if (problem.h > 64) return with_columns<128>(problem.s_q, most, function);
  if (problem.h > 32) return with_columns<64>(problem.s_q, most, function);
  if (problem.h > 16) return with_columns<32>(problem.s_q, most, function);
  return with_columns<16>(problem.s_q, most, function);
}

}  // namespace winnow::indexer::sm90_detail
