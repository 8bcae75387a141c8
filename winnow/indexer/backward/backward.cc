#include "winnow/indexer/backward/backward.h"

#include "winnow/cpu/entry.h"
#include "winnow/indexer/backward/backward_contract.h"
#include "winnow/indexer/backward/backward_impl.h"

namespace winnow::indexer {
namespace {

struct Backward {
  using Args = BackwardArgs;
  using Params = BackwardParams;
  static constexpr const auto& kContract = kBackward;
  static constexpr auto kCpu = &CpuKernels::indexer_backward;
  static constexpr bool kNeedsWorkspace = false;

  static Params check_args(const Args& args) {
    kBackward.check(args);
    Params params;
    params.problem = problem_of(args);
    if (args.indices.present()) params.topk = args.indices.size(1);
    params.indices = rows_of<const std::int32_t*>(args.indices, 0);
    params.d_scores = rows_of<const float*>(args.d_scores, 0);
    params.deterministic = args.deterministic;
    params.dq_dtype = args.dq.dtype();
    params.dk_dtype = args.dk.dtype();
    params.d_weights_dtype = args.d_weights.dtype();
    params.dq = rows_of<void*>(args.dq, 0, 1);
    params.dk = rows_of<void*>(args.dk, 0);
    params.d_weights = rows_of<void*>(args.d_weights, 0);
    return params;
  }
  static std::span<const Backend> backends(const Args& args) { return with_sm90(args.q.dtype()); }
  static void check_for_gpu(const Check& check, const Args& args, const Params& params,
                            Backend backend) {
    indexer::check_for_gpu(check, backend, args.q, args.k);
    constexpr std::int64_t kAlignment = 16;
    check.aligned("dq", args.dq, kAlignment);
    check.aligned("dk", args.dk, kAlignment);
    check_topk_for_gpu(check, backend, params.topk);
  }
  static bool empty(const Args&, const Params& params) {
    return params.problem.s_q == 0 && params.problem.s_k == 0;
  }
  static std::int64_t workspace_bytes(const Params& params, Backend) {
    return backward_gpu_workspace_bytes(params);
  }
  static void run_on_gpu(const Params& params, Backend backend, void* workspace, void* stream) {
    (backend == Backend::sm90 ? backward_sm90 : backward_cuda)(params, workspace, stream);
  }
};

}  // namespace

Backend backward(const BackwardArgs& args, const RunOptions& options) {
  return enter<Backward>(args, options);
}

std::int64_t backward_workspace_bytes(const BackwardArgs& args, const RunOptions& options) {
  return workspace_bytes_of<Backward>(args, options);
}

}  // namespace winnow::indexer
