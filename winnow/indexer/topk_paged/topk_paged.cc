#include "winnow/indexer/topk_paged/topk_paged.h"

#include "winnow/cpu/entry.h"
#include "winnow/indexer/topk_paged/topk_paged_contract.h"
#include "winnow/indexer/topk_paged/topk_paged_impl.h"

namespace winnow::indexer {
namespace {

struct TopkPaged {
  using Args = TopkPagedArgs;
  using Params = TopkPagedParams;
  static constexpr const auto& kContract = kTopkPaged;
  static constexpr auto kCpu = &CpuKernels::indexer_topk_paged;
  static constexpr bool kNeedsWorkspace = false;

  static Params check_args(const Args& args) {
    kTopkPaged.check(args);
    Params params;
    static_cast<PagedProblem&>(params) = paged_problem_of(args);
    params.topk = args.indices.size(2);
    params.later_ties = args.ties == Ties::larger;
    params.positions = args.positions;
    params.indices = rows_of<std::int32_t*>(args.indices, 0, 1);
    params.length = rows_of<std::int32_t*>(args.length, 0, 1);
    params.scores = rows_of<float*>(args.scores, 0, 1);
    return params;
  }
  static std::span<const Backend> backends(const Args& args) { return with_sm90(args.q.dtype()); }
  static void check_for_gpu(const Check& check, const Args& args, const Params&, Backend backend) {
    check_paged_for_gpu(check, backend, args.q, args.pages);
  }
  static bool empty(const Args&, const Params& params) { return params.b == 0 || params.s_q == 0; }
  static std::int64_t workspace_bytes(const Params& params, Backend backend) {
    return backend == Backend::sm90 ? topk_paged_sm90_workspace_bytes(params)
                                    : topk_paged_cuda_workspace_bytes(params);
  }
  static void run_on_gpu(const Params& params, Backend backend, void* workspace, void* stream) {
    (backend == Backend::sm90 ? topk_paged_sm90 : topk_paged_cuda)(params, workspace, stream);
  }
};

}  // namespace

Backend topk_paged(const TopkPagedArgs& args, const RunOptions& options) {
  return enter<TopkPaged>(args, options);
}

std::int64_t topk_paged_workspace_bytes(const TopkPagedArgs& args, const RunOptions& options) {
  return workspace_bytes_of<TopkPaged>(args, options);
}

}  // namespace winnow::indexer
