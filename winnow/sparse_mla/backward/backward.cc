#include "winnow/sparse_mla/backward/backward.h"

#include <string>

#include "winnow/core/check.h"
#include "winnow/core/device_memory.h"
#include "winnow/core/record.h"
#include "winnow/core/route.h"
#include "winnow/cpu/kernels.h"
#include "winnow/sparse_mla/backward/backward_contract.h"
#include "winnow/sparse_mla/backward/backward_impl.h"

namespace winnow::sparse_mla {
namespace {

constexpr std::string_view kOperation = kBackward.operation;

BackwardParams check_args(const BackwardArgs& args) {
  kBackward.check(args);
  BackwardParams params;
  params.problem = problem_of(args);
  params.out = args.delta.present() ? Rows<const void*>{} : rows_of<const void*>(args.out, 0, 1);
  params.d_out = rows_of<const void*>(args.d_out, 0, 1);
  params.lse = rows_of<const void*>(args.lse, 0);
  params.attn_sink = rows_of<const void*>(args.attn_sink, 0);
  params.delta = rows_of<const void*>(args.delta, 0);
  params.deterministic = args.deterministic;
  params.dq_dtype = args.dq.dtype();
  params.dkv_dtype = args.dkv.dtype();
  params.dextra_kv_dtype = args.dextra_kv.dtype();
  params.dq = rows_of<void*>(args.dq, 0, 1);
  params.dkv = rows_of<void*>(args.dkv, 0);
  params.dextra_kv = rows_of<void*>(args.dextra_kv, 0);
  params.d_sink = rows_of<void*>(args.d_sink, 0);
  return params;
}

constexpr Backend kImplemented[] = {Backend::sm100, Backend::sm90, Backend::cuda, Backend::cpu};

bool empty(const BackwardArgs& args) {
  return args.dq.numel() == 0 && args.dkv.numel() == 0 && args.dextra_kv.numel() == 0 &&
         args.d_sink.numel() == 0;
}

// Call after check_args_for_gpu().
std::int64_t workspace_bytes(const BackwardArgs& args, const BackwardParams& params,
                             Backend backend) {
  if (backend == Backend::cpu || empty(args)) return 0;
  if constexpr (kBuiltWithCuda) {
    const DeviceGuard guard(args.q.device());
    if constexpr (kBuiltForSm100) {
      if (backend == Backend::sm100) return backward_sm100_workspace_bytes(params);
    }
    return backend == Backend::sm90 ? backward_sm90_workspace_bytes(params)
                                    : backward_cuda_workspace_bytes(params);
  }
  return 0;
}

// In kernels rows and entries of both sources share one sequence of 32-bit numbers.
void check_sizes_of_sources(const Check& check, Backend backend, Problem problem) {
  constexpr std::int64_t kLimit = std::int64_t{1} << 30;
  if (problem.extra.kv.present() && problem.all_rows() > kLimit) {
    check.unsupported(std::string(to_string(backend)) +
                      ": want kv and extra_kv of up to 2^30 rows together, got " +
                      std::to_string(problem.all_rows()));
  }
  problem.topk = problem.all_entries();
  problem.extra = {};
  check_sizes_for_gpu(check, backend, problem);
}

// The GPU backends have the same requirements, but sm100 takes no ranges and no second source.
void check_args_for_gpu(const BackwardArgs& args, const BackwardParams& params, Backend backend) {
  const Check check(kOperation);
  if (backend == Backend::sm100) {
    check_one_source(check, backend, params.problem);
    if (params.problem.dense) {
      check.unsupported(std::string(to_string(backend)) +
                        ": want the rows of each query as indices, got a range");
    }
  }
  check_for_gpu(check, "q", args.q);
  check_for_gpu(check, "kv", args.kv);
  if (!args.delta.present()) check_for_gpu(check, "out", args.out);
  check_for_gpu(check, "d_out", args.d_out);
  check.aligned("dq", args.dq, 16);
  check.aligned("dkv", args.dkv, 16);
  if (args.extra_kv.present()) {
    check_for_gpu(check, "extra_kv", args.extra_kv);
    check.aligned("dextra_kv", args.dextra_kv, 16);
  }
  check_sizes_of_sources(check, backend, params.problem);
}

Backend run(const BackwardArgs& args, const RunOptions& options) {
  const BackwardParams params = check_args(args);
  const Backend backend = choose_backend(kOperation, args.q.device(), options, kImplemented);
  if (backend != Backend::cpu) {
    check_args_for_gpu(args, params, backend);
    if (args.workspace.present()) {
      Check(kOperation)
          .workspace(args.workspace, workspace_bytes(args, params, backend), args.q.device());
    }
  }
  if (options.dry_run) return backend;
  kBackward.apart(args, backend == Backend::cpu ? TensorView{} : args.workspace);
  if (empty(args)) return backend;
  if (backend == Backend::cpu) {
    run_on_cpu(kOperation, cpu_kernels().sparse_mla_backward, params);
  } else if constexpr (kBuiltWithCuda) {
    const DeviceGuard guard(args.q.device());
    if constexpr (kBuiltForSm100) {
      if (backend == Backend::sm100) {
        backward_sm100(params, args.workspace.data(), options.stream.handle);
        return backend;
      }
    }
    const auto function = backend == Backend::sm90 ? backward_sm90 : backward_cuda;
    function(params, args.workspace.data(), options.stream.handle);
  }
  return backend;
}

}  // namespace

Backend backward(const BackwardArgs& args, const RunOptions& options) {
  return recorded(kBackward, args, options, run);
}

std::int64_t backward_workspace_bytes(const BackwardArgs& args, const RunOptions& options) {
  const BackwardParams params = check_args(args);
  const Backend backend = choose_backend(kOperation, args.q.device(), options, kImplemented);
  if (backend != Backend::cpu) check_args_for_gpu(args, params, backend);
  return workspace_bytes(args, params, backend);
}

}  // namespace winnow::sparse_mla
