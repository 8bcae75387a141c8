#include "winnow/indexer/scores/scores.h"

#include <string>

#include "winnow/core/check.h"
#include "winnow/core/device_memory.h"
#include "winnow/core/record.h"
#include "winnow/core/route.h"
#include "winnow/cpu/kernels.h"
#include "winnow/indexer/scores/scores_contract.h"
#include "winnow/indexer/scores/scores_impl.h"

namespace winnow::indexer {
namespace {

constexpr std::string_view kOperation = kScores.operation;

ScoresParams check_args(const ScoresArgs& args) {
  kScores.check(args);
  ScoresParams params;
  params.problem = problem_of(args);
  params.clean = args.clean;
  if (args.indices.present()) params.topk = args.indices.size(1);
  params.indices = rows_of<const std::int32_t*>(args.indices, 0);
  params.scores = rows_of<float*>(args.scores, 0);
  return params;
}

Backend run(const ScoresArgs& args, const RunOptions& options) {
  const ScoresParams params = check_args(args);
  constexpr Backend kImplemented[] = {Backend::sm90, Backend::cuda, Backend::cpu};
  const Backend backend = choose_backend(kOperation, args.q.device(), options,
                                         backends_for(args.q.dtype(), kImplemented));
  if (backend != Backend::cpu) {
    const Check check(kOperation);
    check_for_gpu(check, backend, args.q, args.k);
    constexpr std::int64_t kLimit = std::int64_t{1} << 30;
    if (params.topk > kLimit) {
      check.unsupported(std::string(to_string(backend)) + ": want topk up to 2^30, got " +
                        std::to_string(params.topk));
    }
  }
  if (options.dry_run) return backend;
  kScores.apart(args);
  if (args.scores.numel() == 0) return backend;
  if (backend == Backend::cpu) {
    run_on_cpu(kOperation, cpu_kernels().indexer_scores, params);
  } else if constexpr (kBuiltWithCuda) {
    const DeviceGuard guard(args.q.device());
    const auto scores_gpu = backend == Backend::sm90 ? scores_sm90 : scores_cuda;
    scores_gpu(params, options.stream.handle);
  }
  return backend;
}

}  // namespace

Backend scores(const ScoresArgs& args, const RunOptions& options) {
  return recorded(kScores, args, options, run);
}

}  // namespace winnow::indexer
