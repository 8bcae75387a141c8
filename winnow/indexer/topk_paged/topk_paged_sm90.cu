// The choice of rows from a paged cache, sm90: workspace and launches.
#include <algorithm>
#include <cstdint>

#include "winnow/device/common/scratch.h"
#include "winnow/indexer/topk_paged/choose_paged_sm90.cuh"
#include "winnow/indexer/topk_paged/paged_launch_sm90.h"
#include "winnow/indexer/topk_paged/topk_paged_impl.h"

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

// Queries whose keys the workspace has room for.
std::int64_t most_queries(const TopkPagedParams& params) {
  return kWorkspaceLimit / (stored_stride(params) * std::int64_t{sizeof(std::uint32_t)});
}

template <class Shape>
Work plan(const TopkPagedParams& params) {
  Work work{};
  work.groups_of_a_sequence = groups_of_a_sequence<Shape>(params);
  const std::int64_t all = params.b * work.groups_of_a_sequence;
  const std::int64_t bytes = group_bytes<Shape>(params);
  const std::int64_t most = std::clamp<std::int64_t>(kWorkspaceLimit / bytes, 1, kMostGroups);
  const std::int64_t turns = (all + most - 1) / most;
  work.groups = (all + turns - 1) / turns;
  work.bytes = device::scratch_bytes(work.groups * bytes);
  return work;
}

template <class Shape>
void launch(const TopkPagedParams& params, void* workspace, cudaStream_t stream) {
  const Work work = plan<Shape>(params);
  PagedParams<PagedKeys> p{};
  describe<Shape>(kRuntime, params, p);
  p.stored.keys = static_cast<std::uint32_t*>(workspace);
  p.stored.stride = static_cast<std::uint32_t>(stored_stride(params));
  p.stored.queries = static_cast<int>(stored_queries<Shape>(params));

  PagedChooseParams choose = paged_choose_params(params);
  choose.stored = p.stored.keys;
  choose.stored_stride = p.stored.stride;
  choose.stored_queries = p.stored.queries;

  constexpr int kBytes = sizeof(PagedLayout<Shape, false>);
  const auto kernel = paged_scores_kernel<Shape, PagedParams<PagedKeys>>;
  kRuntime.allow_shared_memory(kernel, kBytes);
  const auto blocks = static_cast<unsigned>(kRuntime.multiprocessors());
  p.blocks = device::FastDivmod(blocks);
  const std::int64_t all = params.b * work.groups_of_a_sequence;
  // The query with which a group begins.
  const auto first_query = [&](std::int64_t group) {
    return group / work.groups_of_a_sequence * params.s_q +
           group % work.groups_of_a_sequence * Shape::kQueries;
  };
  for (std::int64_t group = 0; group < all; group += work.groups) {
    const std::int64_t end = std::min(group + work.groups, all);
    p.line.set_groups(group, end);
    choose.line = p.line;
    choose.first_sequence = group / work.groups_of_a_sequence;
    choose.first_query = static_cast<unsigned>(first_query(group) % params.s_q);
    kRuntime.check(device::launch_early(kernel, blocks, kPagedThreads, kBytes, stream, p),
                   "launch");
    launch_paged_choice(kRuntime, choose, first_query(end) - first_query(group),
                        params.table * kPagedPageRows, stream);
  }
}

}  // namespace

std::int64_t topk_paged_sm90_workspace_bytes(const TopkPagedParams& params) {
  std::int64_t bytes = 0;
  with_paged_shape(params, most_queries(params),
                   [&](auto shape) { bytes = plan<decltype(shape)>(params).bytes; });
  return bytes;
}

void topk_paged_sm90(const TopkPagedParams& params, void* workspace, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  const device::Scratch scratch(kRuntime, workspace, topk_paged_sm90_workspace_bytes(params),
                                queue);
  with_paged_shape(params, most_queries(params),
                   [&](auto shape) { launch<decltype(shape)>(params, scratch.data(), queue); });
}

}  // namespace winnow::indexer
