#include "winnow/indexer/topk/topk.h"

#include "winnow/cpu/entry.h"
#include "winnow/indexer/topk/topk_contract.h"
#include "winnow/indexer/topk/topk_impl.h"

namespace winnow::indexer {
namespace {

struct Topk {
  using Args = TopkArgs;
  using Params = TopkParams;
  static constexpr const auto& kContract = kTopk;
  static constexpr auto kCpu = &CpuKernels::indexer_topk;
  static constexpr bool kNeedsWorkspace = false;

  static Params check_args(const Args& args) {
    kTopk.check(args);
    Params params;
    params.problem = problem_of(args);
    params.topk = args.indices.size(1);
    params.later_ties = args.ties == Ties::larger;
    params.indices = rows_of<std::int32_t*>(args.indices, 0);
    params.length = rows_of<std::int32_t*>(args.length, 0);
    params.scores = rows_of<float*>(args.scores, 0);
    return params;
  }
  static std::span<const Backend> backends(const Args& args) { return with_sm90(args.q.dtype()); }
  static void check_for_gpu(const Check& check, const Args& args, const Params&, Backend backend) {
    indexer::check_for_gpu(check, backend, args.q, args.k);
  }
  static bool empty(const Args&, const Params& params) { return params.problem.s_q == 0; }
  static std::int64_t workspace_bytes(const Params& params, Backend backend) {
    return backend == Backend::sm90 ? topk_sm90_workspace_bytes(params)
                                    : topk_cuda_workspace_bytes(params);
  }
  static void run_on_gpu(const Params& params, Backend backend, void* workspace, void* stream) {
    (backend == Backend::sm90 ? topk_sm90 : topk_cuda)(params, workspace, stream);
  }
};

}  // namespace

Backend topk(const TopkArgs& args, const RunOptions& options) { return enter<Topk>(args, options); }

std::int64_t topk_workspace_bytes(const TopkArgs& args, const RunOptions& options) {
  return workspace_bytes_of<Topk>(args, options);
}

}  // namespace winnow::indexer
