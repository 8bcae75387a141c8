#include "winnow/sparse_mla/forward/forward.h"

#include "winnow/core/check.h"
#include "winnow/core/device_memory.h"
#include "winnow/core/record.h"
#include "winnow/core/route.h"
#include "winnow/cpu/kernels.h"
#include "winnow/sparse_mla/forward/forward_contract.h"
#include "winnow/sparse_mla/forward/forward_impl.h"

namespace winnow::sparse_mla {
namespace {

constexpr std::string_view kOperation = kForward.operation;

ForwardParams check_args(const ForwardArgs& args) {
  kForward.check(args);
  return {.problem = problem_of(args),
          .in_list_order = args.in_list_order,
          .out = rows_of<void*>(args.out, 0, 1),
          .attn_sink = rows_of<const void*>(args.attn_sink, 0),
          .max_logits = rows_of<void*>(args.max_logits, 0, 1),
          .lse = rows_of<void*>(args.lse, 0, 1)};
}

void check_args_for_gpu(const ForwardArgs& args, Backend backend, const Problem& problem) {
  const Check check(kOperation);
  check_for_gpu(check, "q", args.q);
  check_for_gpu(check, "kv", args.kv);
  check_for_gpu(check, "extra_kv", args.extra_kv);
  check_for_gpu(check, "out", args.out);
  check_sizes_for_gpu(check, backend, problem);
}

Backend backend_of(const ForwardArgs& args, const RunOptions& options) {
  return choose_backend(kOperation, args.q.device(), options, backends_for(args.q.dtype()));
}

// What `workspace` must hold. The backend's other wants have been checked.
std::int64_t workspace_bytes(const ForwardArgs& args, const ForwardParams& params,
                             Backend backend) {
  if (backend != Backend::sm90 || args.out.numel() == 0) return 0;
  if constexpr (kBuiltWithCuda) {
    const DeviceGuard guard(args.q.device());
    return forward_sm90_workspace_bytes(params);
  }
  return 0;
}

Backend run(const ForwardArgs& args, const RunOptions& options) {
  const ForwardParams params = check_args(args);
  const Backend backend = backend_of(args, options);
  std::int64_t scratch = 0;
  if (backend != Backend::cpu) {
    check_args_for_gpu(args, backend, params.problem);
    if (args.workspace.present()) scratch = workspace_bytes(args, params, backend);
    if (scratch > 0) Check(kOperation).workspace(args.workspace, scratch, args.q.device());
  }
  if (options.dry_run) return backend;
  const TensorView workspace = scratch > 0 ? args.workspace : TensorView{};
  kForward.apart(args, workspace);
  if (args.out.numel() == 0) return backend;
  if (backend == Backend::cpu) {
    run_on_cpu(kOperation, cpu_kernels().sparse_mla_forward, params);
  } else if constexpr (kBuiltWithCuda) {
    const DeviceGuard guard(args.q.device());
    if (backend == Backend::sm90) {
      forward_sm90(params, workspace.data(), options.stream.handle);
    } else {
      forward_cuda(params, options.stream.handle);
    }
  }
  return backend;
}

}  // namespace

Backend forward(const ForwardArgs& args, const RunOptions& options) {
  return recorded(kForward, args, options, run);
}

std::int64_t forward_workspace_bytes(const ForwardArgs& args, const RunOptions& options) {
  const ForwardParams params = check_args(args);
  const Backend backend = backend_of(args, options);
  if (backend != Backend::cpu) check_args_for_gpu(args, backend, params.problem);
  return workspace_bytes(args, params, backend);
}

}  // namespace winnow::sparse_mla
