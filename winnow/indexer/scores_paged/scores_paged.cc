#include "winnow/indexer/scores_paged/scores_paged.h"

#include <string>

#include "winnow/cpu/entry.h"
#include "winnow/indexer/scores_paged/scores_paged_contract.h"
#include "winnow/indexer/scores_paged/scores_paged_impl.h"

namespace winnow::indexer {

void check_columns(const Check& check, const TensorView& scores) {
  const std::int64_t columns = scores.size(2);
  check.that(columns <= kMostPages * 64, "scores", "max_context up to 2^31 - 128",
             std::to_string(columns));
}

namespace {

struct ScoresPaged {
  using Args = ScoresPagedArgs;
  using Params = ScoresPagedParams;
  static constexpr const auto& kContract = kScoresPaged;
  static constexpr auto kCpu = &CpuKernels::indexer_scores_paged;

  static Params check_args(const Args& args) {
    kScoresPaged.check(args);
    Params params;
    static_cast<PagedProblem&>(params) = paged_problem_of(args);
    params.clean = args.clean;
    params.max_context = args.scores.size(2);
    params.scores = rows_of<float*>(args.scores, 0, 1);
    return params;
  }
  static std::span<const Backend> backends(const Args& args) { return with_sm90(args.q.dtype()); }
  static void check_for_gpu(const Check& check, const Args& args, const Params&, Backend backend) {
    check_paged_for_gpu(check, backend, args.q, args.pages);
  }
  static bool empty(const Args& args, const Params&) { return args.scores.numel() == 0; }
  static void run_on_gpu(const Params& params, Backend backend, void*, void* stream) {
    (backend == Backend::sm90 ? scores_paged_sm90 : scores_paged_cuda)(params, stream);
  }
};

}  // namespace

Backend scores_paged(const ScoresPagedArgs& args, const RunOptions& options) {
  return enter<ScoresPaged>(args, options);
}

}  // namespace winnow::indexer
