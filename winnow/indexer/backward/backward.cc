#include "winnow/indexer/backward/backward.h"

#include <string>

#include "winnow/core/check.h"
#include "winnow/core/device_memory.h"
#include "winnow/core/record.h"
#include "winnow/core/route.h"
#include "winnow/cpu/kernels.h"
#include "winnow/indexer/backward/backward_contract.h"
#include "winnow/indexer/backward/backward_impl.h"

namespace winnow::indexer {
namespace {

constexpr std::string_view kOperation = kBackward.operation;
constexpr Backend kImplemented[] = {Backend::sm90, Backend::cuda, Backend::cpu};

Backend backend_of(const BackwardArgs& args, const RunOptions& options) {
  return choose_backend(kOperation, args.q.device(), options,
                        backends_for(args.q.dtype(), kImplemented));
}

BackwardParams check_args(const BackwardArgs& args) {
  kBackward.check(args);
  BackwardParams params;
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

bool empty(const BackwardParams& params) {
  return params.problem.s_q == 0 && params.problem.s_k == 0;
}

// What `workspace` must hold.
std::int64_t workspace_bytes(const BackwardParams& params, Backend backend) {
  if (backend == Backend::cpu || empty(params)) return 0;
  if constexpr (kBuiltWithCuda) return backward_gpu_workspace_bytes(params);
  return 0;
}

void check_args_for_gpu(const BackwardArgs& args, const BackwardParams& params, Backend backend) {
  const Check check(kOperation);
  check_for_gpu(check, backend, args.q, args.k);
  constexpr std::int64_t kAlignment = 16;
  check.aligned("dq", args.dq, kAlignment);
  check.aligned("dk", args.dk, kAlignment);
  constexpr std::int64_t kLimit = std::int64_t{1} << 30;
  if (params.topk > kLimit) {
    check.unsupported(std::string(to_string(backend)) + ": want topk up to 2^30, got " +
                      std::to_string(params.topk));
  }
}

Backend run(const BackwardArgs& args, const RunOptions& options) {
  const BackwardParams params = check_args(args);
  const Backend backend = backend_of(args, options);
  if (backend != Backend::cpu) {
    check_args_for_gpu(args, params, backend);
    if (args.workspace.present()) {
      Check(kOperation)
          .workspace(args.workspace, workspace_bytes(params, backend), args.q.device());
    }
  }
  if (options.dry_run) return backend;
  const TensorView workspace = backend == Backend::cpu ? TensorView{} : args.workspace;
  kBackward.apart(args, workspace);
  if (empty(params)) return backend;
  if (backend == Backend::cpu) {
    run_on_cpu(kOperation, cpu_kernels().indexer_backward, params);
  } else if constexpr (kBuiltWithCuda) {
    const DeviceGuard guard(args.q.device());
    const auto backward_gpu = backend == Backend::sm90 ? backward_sm90 : backward_cuda;
    backward_gpu(params, workspace.data(), options.stream.handle);
  }
  return backend;
}

}  // namespace

Backend backward(const BackwardArgs& args, const RunOptions& options) {
  return recorded(kBackward, args, options, run);
}

std::int64_t backward_workspace_bytes(const BackwardArgs& args, const RunOptions& options) {
  const BackwardParams params = check_args(args);
  const Backend backend = backend_of(args, options);
  if (backend != Backend::cpu) check_args_for_gpu(args, params, backend);
  return workspace_bytes(params, backend);
}

}  // namespace winnow::indexer
