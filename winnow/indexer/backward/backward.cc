#include "winnow/indexer/backward/backward.h"

#include <string>

#include "winnow/core/check.h"
#include "winnow/core/device_memory.h"
#include "winnow/core/record.h"
#include "winnow/core/route.h"
#include "winnow/cpu/kernels.h"
#include "winnow/indexer/backward/backward_fields.h"
#include "winnow/indexer/backward/backward_impl.h"

namespace winnow::indexer {
namespace {

constexpr std::string_view kOperation = "indexer::backward";
constexpr Backend kImplemented[] = {Backend::sm90, Backend::cpu};

// An output in f32 or in the dtype of its input; nobody can use a gradient in f8_e4m3.
void check_gradient(const Check& check, std::string_view name, const TensorView& view,
                    std::initializer_list<Dim> dims, DType dtype, Device device) {
  const DType narrow = dtype == DType::f8_e4m3 ? DType::bf16 : dtype;
  if (narrow == DType::f32) {
    check.output(name, view, dims, {DType::f32}, device);
  } else {
    check.output(name, view, dims, {DType::f32, narrow}, device);
  }
}

BackwardParams check_args(const BackwardArgs& args) {
  const Check check(kOperation);
  BackwardParams params;
  params.problem = check_problem(check, inputs_of(args));
  const Problem& problem = params.problem;
  const Device device = args.q.device();
  const Dim s_q{"s_q", problem.s_q}, h{"h", problem.h}, d{"d", problem.d}, s_k{"s_k", problem.s_k};
  Dim columns = s_k;
  if (args.indices.present()) {
    check.rank("indices", args.indices, 2, "[s_q, topk]");
    params.topk = args.indices.size(1);
    columns = {"topk", params.topk};
    check.input("indices", args.indices, {s_q, columns}, {DType::i32}, device);
  }
  check.input("d_scores", args.d_scores, {s_q, columns}, {DType::f32}, device);
  check_gradient(check, "dq", args.dq, {s_q, h, d}, problem.dtype, device);
  check_gradient(check, "dk", args.dk, {s_k, d}, problem.dtype, device);
  check_gradient(check, "d_weights", args.d_weights, {s_q, h}, problem.weights_dtype, device);

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

// What `workspace` must hold. The backend's other wants have been checked.
std::int64_t workspace_bytes(const BackwardArgs& args, const BackwardParams& params,
                             Backend backend) {
  if (backend == Backend::cpu || empty(params)) return 0;
  if constexpr (kBuiltWithCuda) {
    const DeviceGuard guard(args.q.device());
    return backward_sm90_workspace_bytes(params);
  }
  return 0;
}

void check_args_for_sm90(const BackwardArgs& args, const BackwardParams& params) {
  const Check check(kOperation);
  check_for_sm90(check, inputs_of(args), params.problem);
  constexpr std::int64_t kAlignment = 16;
  check.aligned("dq", args.dq, kAlignment);
  check.aligned("dk", args.dk, kAlignment);
  constexpr std::int64_t kLimit = std::int64_t{1} << 30;
  if (params.topk > kLimit) {
    check.unsupported("sm90: want topk up to 2^30, got " + std::to_string(params.topk));
  }
}

Backend run(const BackwardArgs& args, const RunOptions& options) {
  const BackwardParams params = check_args(args);
  const Backend backend = choose_backend(kOperation, args.q.device(), options, kImplemented);
  if (backend == Backend::sm90) {
    check_args_for_sm90(args, params);
    if (args.workspace.present()) {
      Check(kOperation)
          .workspace(args.workspace, workspace_bytes(args, params, backend), args.q.device());
    }
  }
  if (options.dry_run) return backend;
  const TensorView workspace = backend == Backend::cpu ? TensorView{} : args.workspace;
  Check(kOperation)
      .apart({{"dq", args.dq},
              {"dk", args.dk},
              {"d_weights", args.d_weights},
              {"workspace", workspace}},
             {{"q", args.q},
              {"k", args.k},
              {"weights", args.weights},
              {"indices", args.indices},
              {"d_scores", args.d_scores},
              {"k_scale", args.k_scale},
              {"key_start", args.key_start},
              {"key_end", args.key_end}});
  if (empty(params)) return backend;
  if (backend == Backend::cpu) {
    run_on_cpu(kOperation, cpu_kernels().indexer_backward, params);
  } else if constexpr (kBuiltWithCuda) {
    const DeviceGuard guard(args.q.device());
    backward_sm90(params, workspace.data(), options.stream.handle);
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
  if (backend == Backend::sm90) check_args_for_sm90(args, params);
  return workspace_bytes(args, params, backend);
}

}  // namespace winnow::indexer
