#include "winnow/indexer/scores/scores.h"

#include <string>

#include "winnow/cpu/entry.h"
#include "winnow/indexer/scores/scores_contract.h"
#include "winnow/indexer/scores/scores_impl.h"

namespace winnow::indexer {

void check_width(const Check& check, const ScoresArgs& args) {
  if (!args.width.has_value()) return;
  check_range_of_width(check, args.width);
  check.that(!args.indices.present(), "width", "none beside indices", std::to_string(*args.width));
  check.that(args.key_start.present(), "key_start", "a tensor [s_q], which width needs", "none");
}

namespace {

struct Scores {
  using Args = ScoresArgs;
  using Params = ScoresParams;
  static constexpr const auto& kContract = kScores;
  static constexpr auto kCpu = &CpuKernels::indexer_scores;

  static Params check_args(const Args& args) {
    kScores.check(args);
    Params params;
    params.problem = problem_of(args);
    params.clean = args.clean;
    if (args.indices.present()) params.topk = args.indices.size(1);
    params.width = args.width;
    params.indices = rows_of<const std::int32_t*>(args.indices, 0);
    params.scores = rows_of<float*>(args.scores, 0);
    return params;
  }
  static std::span<const Backend> backends(const Args& args) { return with_sm90(args.q.dtype()); }
  static void check_for_gpu(const Check& check, const Args& args, const Params& params,
                            Backend backend) {
    indexer::check_for_gpu(check, backend, args.q, args.k);
    check_topk_for_gpu(check, backend, params.topk);
    check_topk_for_gpu(check, backend, params.width.value_or(0), "width");
  }
  static bool empty(const Args& args, const Params&) { return args.scores.numel() == 0; }
  static void run_on_gpu(const Params& params, Backend backend, void*, void* stream) {
    (backend == Backend::sm90 ? scores_sm90 : scores_cuda)(params, stream);
  }
};

}  // namespace

Backend scores(const ScoresArgs& args, const RunOptions& options) {
  return enter<Scores>(args, options);
}

}  // namespace winnow::indexer
