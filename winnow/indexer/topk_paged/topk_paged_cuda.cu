// The choice of rows from a paged cache, cuda: workspace and launches. The keys of scores are
// stored, and a second kernel chooses from them.
#include <algorithm>
#include <cstdint>

#include "winnow/device/common/scratch.h"
#include "winnow/indexer/topk/choose_launch_cuda.h"
#include "winnow/indexer/topk_paged/paged_launch_cuda.h"
#include "winnow/indexer/topk_paged/topk_paged_impl.h"

namespace winnow::indexer {
namespace {

using namespace cuda_detail;

constexpr device::Runtime kRuntime{"indexer::topk_paged", "cuda"};

// How a call is cut into launches, which share the workspace.
struct Work {
  PagedParams<PagedKeys> params;
  std::int64_t tiles;   // of a group at most
  std::int64_t all;     // groups
  std::int64_t groups;  // of a launch at most
  std::int64_t bytes;
};

Work plan_work(const TopkPagedParams& params) {
  Work work{};
  work.tiles = std::max<std::int64_t>(
      1, device::ceil_div<std::int64_t>(params.table * gpu::kPagedPageRows, kTileRows));
  const std::int64_t stride = work.tiles * kTileRows;
  const std::int64_t row_bytes = stride * std::int64_t{sizeof(std::uint32_t)};
  work.params = paged_params<PagedKeys>(params, gpu::kWorkspaceLimit / row_bytes);
  PagedParams<PagedKeys>& p = work.params;
  if (params.num_pages == 0) p.line.table = 0;
  p.stored.stride = stride;
  p.stored.queries = static_cast<int>(std::min<std::int64_t>(p.columns.queries, params.s_q));
  work.all = params.b * p.line.groups_of_a_sequence;
  const std::int64_t group_bytes = p.stored.queries * row_bytes;
  const std::int64_t most = std::max<std::int64_t>(gpu::kWorkspaceLimit / group_bytes, 1);
  const std::int64_t turns = device::ceil_div(work.all, most);
  work.groups = device::ceil_div(work.all, turns);
  work.bytes = device::scratch_bytes(work.groups * group_bytes);
  return work;
}

}  // namespace

std::int64_t topk_paged_cuda_workspace_bytes(const TopkPagedParams& params) {
  return plan_work(params).bytes;
}

void topk_paged_cuda(const TopkPagedParams& params, void* workspace, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  Work work = plan_work(params);
  const device::Scratch scratch(kRuntime, workspace, work.bytes, queue);
  PagedParams<PagedKeys>& p = work.params;
  p.stored.keys = static_cast<std::uint32_t*>(scratch.data());
  gpu::PagedChooseParams choose = gpu::paged_choose_params(params);
  choose.stored = p.stored.keys;
  choose.stored_stride = p.stored.stride;
  choose.stored_queries = p.stored.queries;
  // The query with which a group begins.
  const std::int64_t of_a_sequence = p.line.groups_of_a_sequence;
  const auto first_query = [&](std::int64_t group) {
    return group / of_a_sequence * params.s_q + group % of_a_sequence * p.columns.queries;
  };
  for (std::int64_t group = 0; group < work.all; group += work.groups) {
    const std::int64_t end = std::min(group + work.groups, work.all);
    launch_paged(kRuntime, p, group, end, work.tiles, queue);
    choose.line = p.line;
    choose.first_sequence = group / of_a_sequence;
    choose.first_query = static_cast<unsigned>(first_query(group) % params.s_q);
    launch_choice(kRuntime, choose, first_query(end) - first_query(group),
                  params.table * gpu::kPagedPageRows, queue);
  }
}

}  // namespace winnow::indexer
