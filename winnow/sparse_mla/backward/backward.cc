#include "winnow/sparse_mla/backward/backward.h"

#include <string>

#include "winnow/cpu/entry.h"
#include "winnow/sparse_mla/backward/backward_contract.h"
#include "winnow/sparse_mla/backward/backward_impl.h"

namespace winnow::sparse_mla {
namespace {

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

struct Backward {
  using Args = BackwardArgs;
  using Params = BackwardParams;
  static constexpr const auto& kContract = kBackward;
  static constexpr auto kCpu = &CpuKernels::sparse_mla_backward;
  static constexpr bool kNeedsWorkspace = false;

  static Params check_args(const Args& args) {
    kBackward.check(args);
    Params params;
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
  static std::span<const Backend> backends(const Args& args) {
    static constexpr Backend kAll[] = {Backend::sm100, Backend::sm90, Backend::cuda, Backend::cpu};
    return args.q.dtype() == DType::f16 ? std::span<const Backend>(kPortable) : kAll;
  }
  // The GPU backends want the same, but sm100 takes no ranges and no second source.
  static void check_for_gpu(const Check& check, const Args& args, const Params& params,
                            Backend backend) {
    if (backend == Backend::sm100) {
      check_one_source(check, backend, params.problem);
      if (params.problem.dense) {
        check.unsupported(std::string(to_string(backend)) +
                          ": want the rows of each query as indices, got a range");
      }
    }
    sparse_mla::check_for_gpu(check, "q", args.q);
    sparse_mla::check_for_gpu(check, "kv", args.kv);
    if (!args.delta.present()) sparse_mla::check_for_gpu(check, "out", args.out);
    sparse_mla::check_for_gpu(check, "d_out", args.d_out);
    check.aligned("dq", args.dq, 16);
    check.aligned("dkv", args.dkv, 16);
    if (args.extra_kv.present()) {
      sparse_mla::check_for_gpu(check, "extra_kv", args.extra_kv);
      check.aligned("dextra_kv", args.dextra_kv, 16);
    }
    check_sizes_of_sources(check, backend, params.problem);
  }
  static bool empty(const Args& args, const Params&) {
    return args.dq.numel() == 0 && args.dkv.numel() == 0 && args.dextra_kv.numel() == 0 &&
           args.d_sink.numel() == 0;
  }
  static std::int64_t workspace_bytes(const Params& params, Backend backend) {
    if constexpr (kBuiltForSm100) {
      if (backend == Backend::sm100) return backward_sm100_workspace_bytes(params);
    }
    return backend == Backend::sm90 ? backward_sm90_workspace_bytes(params)
                                    : backward_cuda_workspace_bytes(params);
  }
  static void run_on_gpu(const Params& params, Backend backend, void* workspace, void* stream) {
    if constexpr (kBuiltForSm100) {
      if (backend == Backend::sm100) return backward_sm100(params, workspace, stream);
    }
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

}  // namespace winnow::sparse_mla
