// Scores on the CPU: of all rows by blocks, or of the rows that `indices` names, gathered.
#include <limits>
#include <vector>

#include "winnow/core/read_once.h"
#include "winnow/indexer/score_cpu.h"
#include "winnow/indexer/scores/scores_impl.h"

namespace winnow::indexer {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Scores [first, first + kBlock) of a query's row of the output. Every index is read once.
void score_block(const ScoresParams& params, Scorer& scorer, std::int64_t i, std::int64_t n,
                 std::int64_t first) {
  const Problem& problem = params.problem;
  const bool dense = !params.indices.present();
  const std::int64_t columns = dense ? problem.s_k : params.topk;
  const std::int64_t count = std::min(kBlock, columns - first);
  const RowRange visible = problem.visible_rows(i);
  std::int64_t row[kBlock];
  for (std::int64_t r = 0; r < kBlock; ++r) {
    row[r] = -1;
    if (r >= count) continue;
    const std::int64_t t =
        dense ? first + r : read_once(params.indices.data + params.indices.offset(i) + first + r);
    if (t >= visible.begin && t < visible.end) row[r] = t;
  }
  if (!dense) scorer.load_keys(problem, [&](std::int64_t r) { return row[r]; });
  float scores[kBlock];
  scorer.score(problem, n, scores);
  float* const out = params.scores.data + params.scores.offset(i) + first;
  for (std::int64_t r = 0; r < count; ++r) out[r] = row[r] < 0 ? -kInfinity : scores[r];
}

}  // namespace

void scores_cpu(const ScoresParams& params, const Executor& executor) {
  const Problem& problem = params.problem;
  const bool dense = !params.indices.present();
  constexpr std::int64_t kTogether = 4;  // queries that share a block of keys
  const std::int64_t together = dense ? kTogether : 1;
  const std::int64_t groups = (problem.s_q + together - 1) / together;
  const std::int64_t blocks = ((dense ? problem.s_k : params.topk) + kBlock - 1) / kBlock;
  auto scorers = scratch_of_workers<Scorer>(executor, groups, problem, together);
  executor.for_each_range(groups, 1, [&](std::int64_t group, std::int64_t, int worker) {
    Scorer& scorer = scorers[static_cast<std::size_t>(worker)];
    const std::int64_t first = group * together;
    const std::int64_t count = std::min(together, problem.s_q - first);
    scorer.load_queries(problem, first, count);
    for (std::int64_t block = 0; block < blocks && !executor.stopped(); ++block) {
      if (dense) scorer.load_block(problem, block * kBlock);
      for (std::int64_t n = 0; n < count; ++n) {
        score_block(params, scorer, first + n, n, block * kBlock);
      }
    }
  });
}

}  // namespace winnow::indexer
