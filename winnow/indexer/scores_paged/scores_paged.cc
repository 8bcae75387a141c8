#include "winnow/indexer/scores_paged/scores_paged.h"

#include <string>

#include "winnow/core/check.h"
#include "winnow/core/device_memory.h"
#include "winnow/core/record.h"
#include "winnow/core/route.h"
#include "winnow/cpu/kernels.h"
#include "winnow/indexer/scores_paged/scores_paged_contract.h"
#include "winnow/indexer/scores_paged/scores_paged_impl.h"

namespace winnow::indexer {

void check_columns(const Check& check, const TensorView& scores) {
  const std::int64_t columns = scores.size(2);
  check.that(columns <= kMostPages * 64, "scores", "max_context up to 2^31 - 128",
             std::to_string(columns));
}

namespace {

constexpr std::string_view kOperation = kScoresPaged.operation;

ScoresPagedParams check_args(const ScoresPagedArgs& args) {
  kScoresPaged.check(args);
  ScoresPagedParams params;
  static_cast<PagedProblem&>(params) = paged_problem_of(args);
  params.clean = args.clean;
  params.max_context = args.scores.size(2);
  params.scores = rows_of<float*>(args.scores, 0, 1);
  return params;
}

Backend run(const ScoresPagedArgs& args, const RunOptions& options) {
  const ScoresPagedParams params = check_args(args);
  constexpr Backend kImplemented[] = {Backend::sm90, Backend::cuda, Backend::cpu};
  const Backend backend = choose_backend(kOperation, args.q.device(), options, kImplemented);
  if (backend != Backend::cpu) {
    check_paged_for_gpu(Check(kOperation), backend, args.q, args.pages);
  }
  if (options.dry_run) return backend;
  kScoresPaged.apart(args);
  if (args.scores.numel() == 0) return backend;
  if (backend == Backend::cpu) {
    run_on_cpu(kOperation, cpu_kernels().indexer_scores_paged, params);
  } else if constexpr (kBuiltWithCuda) {
    const DeviceGuard guard(args.q.device());
    const auto scores_paged_gpu = backend == Backend::sm90 ? scores_paged_sm90 : scores_paged_cuda;
    scores_paged_gpu(params, options.stream.handle);
  }
  return backend;
}

}  // namespace

Backend scores_paged(const ScoresPagedArgs& args, const RunOptions& options) {
  return recorded(kScoresPaged, args, options, run);
}

}  // namespace winnow::indexer
