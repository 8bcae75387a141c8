#include "winnow/indexer/topk/topk.h"

#include "winnow/core/check.h"
#include "winnow/core/device_memory.h"
#include "winnow/core/record.h"
#include "winnow/core/route.h"
#include "winnow/cpu/kernels.h"
#include "winnow/indexer/topk/topk_fields.h"
#include "winnow/indexer/topk/topk_impl.h"

namespace winnow::indexer {
namespace {

constexpr std::string_view kOperation = "indexer::topk";
constexpr Backend kImplemented[] = {Backend::sm90, Backend::cpu};

TopkParams check_args(const TopkArgs& args) {
  const Check check(kOperation);
  TopkParams params;
  params.problem = check_problem(check, inputs_of(args));
  const Device device = args.q.device();
  check.rank("indices", args.indices, 2, "[s_q, topk]");
  params.topk = args.indices.size(1);
  check.that(params.topk >= 1 && params.topk <= std::numeric_limits<std::int32_t>::max(), "indices",
             "topk from 1 to 2^31 - 1", std::to_string(params.topk));
  const Dim s_q{"s_q", params.problem.s_q}, topk{"topk", params.topk};
  check.output("indices", args.indices, {s_q, topk}, {DType::i32}, device);
  check.output("length", args.length, {s_q}, {DType::i32}, device);
  if (args.scores.present()) {
    check.output("scores", args.scores, {s_q, topk}, {DType::f32}, device);
  }
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
    return topk_sm90_workspace_bytes(params);
  }
  return 0;
}

Backend run(const TopkArgs& args, const RunOptions& options) {
  const TopkParams params = check_args(args);
  const Backend backend = choose_backend(kOperation, args.q.device(), options, kImplemented);
  if (backend == Backend::sm90) {
    check_for_sm90(Check(kOperation), inputs_of(args), params.problem);
    if (args.workspace.present()) {
      Check(kOperation)
          .workspace(args.workspace, workspace_bytes(args, params, backend), args.q.device());
    }
  }
  if (options.dry_run) return backend;
  const TensorView workspace = backend == Backend::cpu ? TensorView{} : args.workspace;
  Check(kOperation)
      .apart({{"indices", args.indices},
              {"length", args.length},
              {"scores", args.scores},
              {"workspace", workspace}},
             {{"q", args.q},
              {"k", args.k},
              {"weights", args.weights},
              {"k_scale", args.k_scale},
              {"key_start", args.key_start},
              {"key_end", args.key_end}});
  if (params.problem.s_q == 0) return backend;
  if (backend == Backend::cpu) {
    run_on_cpu(kOperation, cpu_kernels().indexer_topk, params);
  } else if constexpr (kBuiltWithCuda) {
    const DeviceGuard guard(args.q.device());
    topk_sm90(params, args.workspace.data(), options.stream.handle);
  }
  return backend;
}

}  // namespace

Backend topk(const TopkArgs& args, const RunOptions& options) {
  return recorded(kOperation, args, options, run);
}

std::int64_t topk_workspace_bytes(const TopkArgs& args, const RunOptions& options) {
  const TopkParams params = check_args(args);
  const Backend backend = choose_backend(kOperation, args.q.device(), options, kImplemented);
  if (backend == Backend::sm90) {
    check_for_sm90(Check(kOperation), inputs_of(args), params.problem);
  }
  return workspace_bytes(args, params, backend);
}

}  // namespace winnow::indexer
