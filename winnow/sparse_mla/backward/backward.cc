#include "winnow/sparse_mla/backward/backward.h"

#include <string>

#include "winnow/core/check.h"
#include "winnow/core/device_memory.h"
#include "winnow/core/record.h"
#include "winnow/core/route.h"
#include "winnow/cpu/kernels.h"
#include "winnow/sparse_mla/backward/backward_fields.h"
#include "winnow/sparse_mla/backward/backward_impl.h"
#include "winnow/sparse_mla/forward/forward.h"  // kValueDim

namespace winnow::sparse_mla {
namespace {

constexpr std::string_view kOperation = "sparse_mla::backward";

BackwardParams check_args(const BackwardArgs& args) {
  const Check check(kOperation);
  BackwardParams params;
  params.problem = check_problem(check, args);
  const Dim s_q{"s_q", params.problem.s_q}, h_q{"h_q", params.problem.h_q};
  const Dim d_qk{"d_qk", params.problem.d_qk}, d_v{"d_v", kValueDim};
  const DType dtype = args.q.dtype(), real = accumulator_of(dtype);
  const Device device = args.q.device();
  if (args.delta.present()) {
    check.input("delta", args.delta, {s_q, h_q}, {real}, device);
  } else {
    check.input("out", args.out, {s_q, h_q, d_v}, {dtype}, device);
  }
  check.input("lse", args.lse, {s_q, h_q}, {real}, device);
  check.input("d_out", args.d_out, {s_q, h_q, d_v}, {dtype}, device);
  if (args.attn_sink.present()) {
    check.input("attn_sink", args.attn_sink, {h_q}, {real}, device);
  }
  check.output("dq", args.dq, {s_q, h_q, d_qk}, {dtype, real}, device);
  check.output("dkv", args.dkv, {{"s_kv", params.problem.s_kv}, {"1", 1}, d_qk}, {dtype, real},
               device);
  if (args.d_sink.present()) {
    check.that(args.attn_sink.present(), "d_sink", "attn_sink to be given as well", "no attn_sink");
    check.output("d_sink", args.d_sink, {h_q}, {real}, device);
  }

  params.out = args.delta.present() ? Rows<const void*>{} : rows_of<const void*>(args.out, 0, 1);
  params.d_out = rows_of<const void*>(args.d_out, 0, 1);
  params.lse = rows_of<const void*>(args.lse, 0);
  params.attn_sink = rows_of<const void*>(args.attn_sink, 0);
  params.delta = rows_of<const void*>(args.delta, 0);
  params.deterministic = args.deterministic;
  params.dq_dtype = args.dq.dtype();
  params.dkv_dtype = args.dkv.dtype();
  params.dq = rows_of<void*>(args.dq, 0, 1);
  params.dkv = rows_of<void*>(args.dkv, 0);
  params.d_sink = rows_of<void*>(args.d_sink, 0);
  return params;
}

constexpr Backend kImplemented[] = {Backend::sm100, Backend::sm90, Backend::cpu};

bool empty(const BackwardArgs& args) {
  return args.dq.numel() == 0 && args.dkv.numel() == 0 && args.d_sink.numel() == 0;
}

// What `workspace` must hold. The backend's other wants have been checked.
std::int64_t workspace_bytes(const BackwardArgs& args, const BackwardParams& params,
                             Backend backend) {
  if (backend == Backend::cpu || empty(args)) return 0;
  if constexpr (kBuiltWithCuda) {
    const DeviceGuard guard(args.q.device());
    if constexpr (kBuiltForSm100) {
      if (backend == Backend::sm100) return backward_sm100_workspace_bytes(params);
    }
    return backward_sm90_workspace_bytes(params);
  }
  return 0;
}

// Both GPU backends want the same.
void check_args_for_gpu(const BackwardArgs& args, const BackwardParams& params) {
  const Check check(kOperation);
  check_for_sm90(check, "q", args.q);
  check_for_sm90(check, "kv", args.kv);
  if (!args.delta.present()) check_for_sm90(check, "out", args.out);
  check_for_sm90(check, "d_out", args.d_out);
  check.aligned("dq", args.dq, 16);
  check.aligned("dkv", args.dkv, 16);
  check_sizes_for_sm90(check, params.problem);
}

// With a delta `out` is not read, and on the CPU no workspace is used.
void check_apart(const BackwardArgs& args, Backend backend) {
  const ConstTensorView out = args.delta.present() ? ConstTensorView{} : args.out;
  const TensorView workspace = backend == Backend::cpu ? TensorView{} : args.workspace;
  Check(kOperation)
      .apart(
          {{"dq", args.dq}, {"dkv", args.dkv}, {"d_sink", args.d_sink}, {"workspace", workspace}},
          {{"q", args.q},
           {"kv", args.kv},
           {"indices", args.indices},
           {"topk_length", args.topk_length},
           {"attn_sink", args.attn_sink},
           {"out", out},
           {"lse", args.lse},
           {"d_out", args.d_out},
           {"delta", args.delta}});
}

Backend run(const BackwardArgs& args, const RunOptions& options) {
  const BackwardParams params = check_args(args);
  const Backend backend = choose_backend(kOperation, args.q.device(), options, kImplemented);
  if (backend != Backend::cpu) {
    check_args_for_gpu(args, params);
    if (args.workspace.present()) {
      Check(kOperation)
          .workspace(args.workspace, workspace_bytes(args, params, backend), args.q.device());
    }
  }
  if (options.dry_run) return backend;
  check_apart(args, backend);
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
    backward_sm90(params, args.workspace.data(), options.stream.handle);
  }
  return backend;
}

}  // namespace

Backend backward(const BackwardArgs& args, const RunOptions& options) {
  return recorded(kOperation, args, options, run);
}

std::int64_t backward_workspace_bytes(const BackwardArgs& args, const RunOptions& options) {
  const BackwardParams params = check_args(args);
  const Backend backend = choose_backend(kOperation, args.q.device(), options, kImplemented);
  if (backend != Backend::cpu) check_args_for_gpu(args, params);
  return workspace_bytes(args, params, backend);
}

}  // namespace winnow::sparse_mla
