#include "winnow/indexer/topk_paged/topk_paged.h"

#include "winnow/core/check.h"
#include "winnow/core/device_memory.h"
#include "winnow/core/record.h"
#include "winnow/core/route.h"
#include "winnow/cpu/kernels.h"
#include "winnow/indexer/topk_paged/topk_paged_contract.h"
#include "winnow/indexer/topk_paged/topk_paged_impl.h"

namespace winnow::indexer {
namespace {

constexpr std::string_view kOperation = kTopkPaged.operation;
constexpr Backend kImplemented[] = {Backend::sm90, Backend::cuda, Backend::cpu};

TopkPagedParams check_args(const TopkPagedArgs& args) {
  kTopkPaged.check(args);
  TopkPagedParams params;
  static_cast<PagedProblem&>(params) = paged_problem_of(args);
  params.topk = args.indices.size(2);
  params.later_ties = args.ties == Ties::larger;
  params.positions = args.positions;
  params.indices = rows_of<std::int32_t*>(args.indices, 0, 1);
  params.length = rows_of<std::int32_t*>(args.length, 0, 1);
  params.scores = rows_of<float*>(args.scores, 0, 1);
  return params;
}

// What `workspace` must hold.
std::int64_t workspace_bytes(const TopkPagedArgs& args, const TopkPagedParams& params,
                             Backend backend) {
  if (backend == Backend::cpu || params.b == 0 || params.s_q == 0) return 0;
  if constexpr (kBuiltWithCuda) {
    const DeviceGuard guard(args.q.device());
    return backend == Backend::sm90 ? topk_paged_sm90_workspace_bytes(params)
                                    : topk_paged_cuda_workspace_bytes(params);
  }
  return 0;
}

Backend run(const TopkPagedArgs& args, const RunOptions& options) {
  const TopkPagedParams params = check_args(args);
  const Backend backend = choose_backend(kOperation, args.q.device(), options, kImplemented);
  if (backend != Backend::cpu) {
    check_paged_for_gpu(Check(kOperation), backend, args.q, args.pages);
    if (args.workspace.present()) {
      Check(kOperation)
          .workspace(args.workspace, workspace_bytes(args, params, backend), args.q.device());
    }
  }
  if (options.dry_run) return backend;
  kTopkPaged.apart(args, backend == Backend::cpu ? TensorView{} : args.workspace);
  if (params.b == 0 || params.s_q == 0) return backend;
  if (backend == Backend::cpu) {
    run_on_cpu(kOperation, cpu_kernels().indexer_topk_paged, params);
  } else if constexpr (kBuiltWithCuda) {
    const DeviceGuard guard(args.q.device());
    const auto topk_paged_gpu = backend == Backend::sm90 ? topk_paged_sm90 : topk_paged_cuda;
    topk_paged_gpu(params, args.workspace.data(), options.stream.handle);
  }
  return backend;
}

}  // namespace

Backend topk_paged(const TopkPagedArgs& args, const RunOptions& options) {
  return recorded(kTopkPaged, args, options, run);
}

std::int64_t topk_paged_workspace_bytes(const TopkPagedArgs& args, const RunOptions& options) {
  const TopkPagedParams params = check_args(args);
  const Backend backend = choose_backend(kOperation, args.q.device(), options, kImplemented);
  if (backend != Backend::cpu) {
    check_paged_for_gpu(Check(kOperation), backend, args.q, args.pages);
  }
  return workspace_bytes(args, params, backend);
}

}  // namespace winnow::indexer
