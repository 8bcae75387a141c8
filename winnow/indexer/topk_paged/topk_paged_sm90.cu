// The choice of rows from a paged cache, sm90: workspace and launches.
#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "winnow/device/common/scratch.h"
#include "winnow/device/sm90/tensor_map.h"
#include "winnow/indexer/quantize/quantize.h"
#include "winnow/indexer/topk_paged/choose_paged_sm90.cuh"
#include "winnow/indexer/topk_paged/topk_paged_impl.h"
#include "winnow/indexer/topk_paged/topk_paged_sm90.cuh"

namespace winnow::indexer {
namespace {

using namespace sm90_detail;

constexpr device::Runtime kRuntime{"indexer::topk_paged", "sm90"};

// Of the keys of a query: whole tiles.
std::int64_t stored_stride(const TopkPagedParams& params) {
  const std::int64_t rows = std::max<std::int64_t>(1, params.table * kPagedPageRows);
  return (rows + kPagedTileRows - 1) / kPagedTileRows * kPagedTileRows;
}
// Of a group at most.
template <class Shape>
std::int64_t stored_queries(const TopkPagedParams& params) {
  return std::min<std::int64_t>(Shape::kQueries, params.s_q);
}
template <class Shape>
std::int64_t group_bytes(const TopkPagedParams& params) {
  return stored_queries<Shape>(params) * stored_stride(params) *
         std::int64_t{sizeof(std::uint32_t)};
}

// How a call is cut into launches, which share the workspace.
struct Work {
  std::int64_t groups_of_a_sequence;
  std::int64_t groups;  // of a launch at most
  std::int64_t bytes;
};

template <class Shape>
Work plan(const TopkPagedParams& params) {
  Work work{};
  work.groups_of_a_sequence = (params.s_q + Shape::kQueries - 1) / Shape::kQueries;
  const std::int64_t all = params.b * work.groups_of_a_sequence;
  const std::int64_t bytes = group_bytes<Shape>(params);
  const std::int64_t most = std::clamp<std::int64_t>(kWorkspaceLimit / bytes, 1, kMostGroups);
  const std::int64_t turns = (all + most - 1) / most;
  work.groups = (all + turns - 1) / turns;
  work.bytes = device::scratch_bytes(work.groups * bytes);
  return work;
}

// Pages as the tensor memory accelerator sees them, whose strides are above 0.
void describe_pages(const TopkPagedParams& params, PagedParams& p) {
  const std::int64_t stride = params.pages.stride0;
  const bool many = params.num_pages > 1 && stride != 0;
  p.map_step = !many ? 0 : stride > 0 ? 1 : -1;
  p.map_first = p.map_step < 0 ? static_cast<int>(params.num_pages - 1) : 0;
  if (params.num_pages == 0) return;
  const auto d = static_cast<std::uint64_t>(params.d);
  const std::uint32_t rows = kPagedPageRows + static_cast<std::uint32_t>(4 * kPagedPageRows / d);
  p.loaded_bytes = static_cast<int>(rows * kPanelRowBytes);
  // Columns beyond d read as zeros.
  const device::MapDim dims[] = {
      {d, 0, kPanelRowBytes},
      {rows, d, rows},
      {many ? static_cast<std::uint64_t>(params.num_pages) : 1,
       static_cast<std::uint64_t>(many ? std::abs(stride) : page_bytes(params.d)), 1}};
  p.pages =
      device::tensor_map(kRuntime, CU_TENSOR_MAP_DATA_TYPE_UINT8,
                         params.pages.data + (p.map_step < 0 ? p.map_first * stride : 0), dims);
}

template <class Shape>
void launch(const TopkPagedParams& params, void* workspace, cudaStream_t stream) {
  const Work work = plan<Shape>(params);
  PagedParams p{};
  describe_pages(params, p);
  p.q = static_cast<const std::uint8_t*>(params.q.data);
  p.q_stride0 = params.q.stride0;
  p.q_stride1 = params.q.stride1;
  p.q_head_stride = params.q_head_stride;
  p.weights = params.weights.data;
  p.weights_stride0 = params.weights.stride0;
  p.weights_stride1 = params.weights.stride1;
  p.weights_are_bf16 = params.weights_dtype == DType::bf16;
  p.block_tables = params.block_tables.data;
  p.block_tables_stride = params.block_tables.stride0;
  p.h = static_cast<int>(params.h);
  p.d = static_cast<int>(params.d);
  p.num_pages = static_cast<int>(params.num_pages);
  p.line.context_lens = params.context_lens.data;
  p.line.context_stride = params.context_lens.stride0;
  p.line.of_queries = params.lens_of_queries;
  p.line.groups_of_a_sequence = static_cast<int>(work.groups_of_a_sequence);
  p.line.queries = Shape::kQueries;
  p.line.s_q = params.s_q;
  p.line.table = params.num_pages == 0 ? 0 : static_cast<int>(params.table);
  p.stored = static_cast<std::uint32_t*>(workspace);
  p.stored_stride = static_cast<std::uint32_t>(stored_stride(params));
  p.stored_queries = static_cast<int>(stored_queries<Shape>(params));

  PagedChooseParams choose{};
  choose.stored = p.stored;
  choose.stored_stride = p.stored_stride;
  choose.stored_queries = p.stored_queries;
  choose.block_tables = p.block_tables;
  choose.block_tables_stride = p.block_tables_stride;
  choose.num_pages = p.num_pages;
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

  constexpr int kBytes = sizeof(PagedLayout<Shape>);
  kRuntime.allow_shared_memory(paged_scores_kernel<Shape>, kBytes);
  const auto blocks = static_cast<unsigned>(kRuntime.multiprocessors());
  const std::int64_t all = params.b * work.groups_of_a_sequence;
  // The query with which a group begins.
  const auto first_query = [&](std::int64_t group) {
    return group / work.groups_of_a_sequence * params.s_q +
           group % work.groups_of_a_sequence * Shape::kQueries;
  };
  for (std::int64_t group = 0; group < all; group += work.groups) {
    const std::int64_t end = std::min(group + work.groups, all);
    p.line.first_group = group;
    p.line.groups = static_cast<int>(end - group);
    choose.line = p.line;
    choose.first_sequence = group / work.groups_of_a_sequence;
    choose.first_query = static_cast<unsigned>(first_query(group) % params.s_q);
    kRuntime.check(
        device::launch_early(paged_scores_kernel<Shape>, blocks, kPagedThreads, kBytes, stream, p),
        "launch");
    launch_paged_choice(kRuntime, choose, first_query(end) - first_query(group),
                        params.table * kPagedPageRows, stream);
  }
}

// Calls function(Shape()) with the shape for the heads, which are padded to 16, 32, 64 or 128, and
// as few columns as hold those of all queries; fewer if the workspace has no room for the rows of
// so many queries.
template <int kHeads, class Function>
void with_columns(const TopkPagedParams& params, const Function& function) {
  const auto enough = [&](auto shape, auto more) {
    return params.s_q <= decltype(shape)::kQueries ||
           group_bytes<decltype(more)>(params) > kWorkspaceLimit;
  };
  using Narrow = PagedShape<kHeads, kHeads <= 64 ? 64 : 128>;
  using Middle = PagedShape<kHeads, 128>;
  using Wide = PagedShape<kHeads, 256>;
  if (kHeads <= 64 && enough(Narrow(), Middle())) return function(Narrow());
  if (enough(Middle(), Wide())) return function(Middle());
  return function(Wide());
}
template <class Function>
void with_paged_shape(const TopkPagedParams& params, const Function& function) {
  if (params.h > 64) return with_columns<128>(params, function);
  if (params.h > 32) return with_columns<64>(params, function);
  if (params.h > 16) return with_columns<32>(params, function);
  return with_columns<16>(params, function);
}

}  // namespace

std::int64_t topk_paged_sm90_workspace_bytes(const TopkPagedParams& params) {
  std::int64_t bytes = 0;
  with_paged_shape(params, [&](auto shape) { bytes = plan<decltype(shape)>(params).bytes; });
  return bytes;
}

void topk_paged_sm90(const TopkPagedParams& params, void* workspace, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  const device::Scratch scratch(kRuntime, workspace, topk_paged_sm90_workspace_bytes(params),
                                queue);
  with_paged_shape(params,
                   [&](auto shape) { launch<decltype(shape)>(params, scratch.data(), queue); });
}

}  // namespace winnow::indexer
