#include "winnow/indexer/scores/scores.h"

#include <string>

#include "winnow/core/check.h"
#include "winnow/core/device_memory.h"
#include "winnow/core/record.h"
#include "winnow/core/route.h"
#include "winnow/cpu/kernels.h"
#include "winnow/indexer/scores/scores_fields.h"
#include "winnow/indexer/scores/scores_impl.h"

namespace winnow::indexer {
namespace {

constexpr std::string_view kOperation = "indexer::scores";

ScoresParams check_args(const ScoresArgs& args) {
  const Check check(kOperation);
  ScoresParams params;
  params.problem = check_problem(check, inputs_of(args));
  const Device device = args.q.device();
  const Dim s_q{"s_q", params.problem.s_q};
  Dim columns{"s_k", params.problem.s_k};
  if (args.indices.present()) {
    check.rank("indices", args.indices, 2, "[s_q, topk]");
    params.topk = args.indices.size(1);
    columns = {"topk", params.topk};
    check.input("indices", args.indices, {s_q, columns}, {DType::i32}, device);
  }
  check.output("scores", args.scores, {s_q, columns}, {DType::f32}, device);
  params.indices = rows_of<const std::int32_t*>(args.indices, 0);
  params.scores = rows_of<float*>(args.scores, 0);
  return params;
}

Backend run(const ScoresArgs& args, const RunOptions& options) {
  const ScoresParams params = check_args(args);
  constexpr Backend kImplemented[] = {Backend::sm90, Backend::cpu};
  const Backend backend = choose_backend(kOperation, args.q.device(), options, kImplemented);
  if (backend == Backend::sm90) {
    const Check check(kOperation);
    check_for_sm90(check, inputs_of(args), params.problem);
    constexpr std::int64_t kLimit = std::int64_t{1} << 30;
    if (params.topk > kLimit) {
      check.unsupported("sm90: want topk up to 2^30, got " + std::to_string(params.topk));
    }
  }
  if (options.dry_run) return backend;
  Check(kOperation)
      .apart({{"scores", args.scores}}, {{"q", args.q},
                                         {"k", args.k},
                                         {"weights", args.weights},
                                         {"indices", args.indices},
                                         {"k_scale", args.k_scale},
                                         {"key_start", args.key_start},
                                         {"key_end", args.key_end}});
  if (args.scores.numel() == 0) return backend;
  if (backend == Backend::cpu) {
    run_on_cpu(kOperation, cpu_kernels().indexer_scores, params);
  } else if constexpr (kBuiltWithCuda) {
    const DeviceGuard guard(args.q.device());
    scores_sm90(params, options.stream.handle);
  }
  return backend;
}

}  // namespace

Backend scores(const ScoresArgs& args, const RunOptions& options) {
  return recorded(kOperation, args, options, run);
}

}  // namespace winnow::indexer
