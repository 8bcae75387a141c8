#include "winnow/indexer/topk/topk.h"

#include "winnow/core/check.h"
#include "winnow/core/device_memory.h"
#include "winnow/core/record.h"
#include "winnow/core/route.h"
#include "winnow/cpu/kernels.h"
#include "winnow/indexer/topk/topk_contract.h"
#include "winnow/indexer/topk/topk_impl.h"

namespace winnow::indexer {
namespace {

constexpr std::string_view kOperation = kTopk.operation;
constexpr Backend kImplemented[] = {Backend::sm90, Backend::cuda, Backend::cpu};

Backend backend_of(const TopkArgs& args, const RunOptions& options) {
  return choose_backend(kOperation, args.q.device(), options,
                        backends_for(args.q.dtype(), kImplemented));
}

TopkParams check_args(const TopkArgs& args) {
  kTopk.check(args);
  TopkParams params;
  params.problem = problem_of(args);
  params.topk = args.indices.size(1);
  params.later_ties = args.ties == Ties::larger;
  params.indices = rows_of<std::int32_t*>(args.indices, 0);
  params.length = rows_of<std::int32_t*>(args.length, 0);
  params.scores = rows_of<float*>(args.scores, 0);
  return params;
}

// What `workspace` must hold.
std::int64_t workspace_bytes(const TopkArgs& args, const TopkParams& params, Backend backend) {
  if (backend == Backend::cpu || params.problem.s_q == 0) return 0;
  if constexpr (kBuiltWithCuda) {
    const DeviceGuard guard(args.q.device());
    return backend == Backend::sm90 ? topk_sm90_workspace_bytes(params)
                                    : topk_cuda_workspace_bytes(params);
  }
  return 0;
}

Backend run(const TopkArgs& args, const RunOptions& options) {
  const TopkParams params = check_args(args);
  const Backend backend = backend_of(args, options);
  if (backend != Backend::cpu) {
    check_for_gpu(Check(kOperation), backend, args.q, args.k);
    if (args.workspace.present()) {
      Check(kOperation)
          .workspace(args.workspace, workspace_bytes(args, params, backend), args.q.device());
    }
  }
  if (options.dry_run) return backend;
  kTopk.apart(args, backend == Backend::cpu ? TensorView{} : args.workspace);
  if (params.problem.s_q == 0) return backend;
  if (backend == Backend::cpu) {
    run_on_cpu(kOperation, cpu_kernels().indexer_topk, params);
  } else if constexpr (kBuiltWithCuda) {
    const DeviceGuard guard(args.q.device());
    const auto topk_gpu = backend == Backend::sm90 ? topk_sm90 : topk_cuda;
    topk_gpu(params, args.workspace.data(), options.stream.handle);
  }
  return backend;
}

}  // namespace

Backend topk(const TopkArgs& args, const RunOptions& options) {
  return recorded(kTopk, args, options, run);
}

std::int64_t topk_workspace_bytes(const TopkArgs& args, const RunOptions& options) {
  const TopkParams params = check_args(args);
  const Backend backend = backend_of(args, options);
  if (backend != Backend::cpu) check_for_gpu(Check(kOperation), backend, args.q, args.k);
  return workspace_bytes(args, params, backend);
}

}  // namespace winnow::indexer
