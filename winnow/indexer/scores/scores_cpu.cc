// Scores on the CPU: of all rows or of those from each query's first row on, by blocks, or of the
// rows that `indices` names, gathered.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>

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

// Of a query's row of the output that begins with row `start` of the keys: which columns it sees.
struct SeenColumns {
  std::int64_t start, begin, end;
};
SeenColumns seen_columns(const ScoresParams& params, std::int64_t i) {
  const Problem& problem = params.problem;
  const std::int64_t start = read_once(problem.key_start.data + problem.key_start.offset(i));
  const RowRange visible = problem.visible_rows(i);
  const std::int64_t begin = std::clamp<std::int64_t>(visible.begin - start, 0, *params.width);
  return {start, begin, std::clamp(visible.end - start, begin, *params.width)};
}

// Scores from each query's first row on: the queries of a scorer, first + n.
void score_from_start(const ScoresParams& params, Scorer& scorer, std::int64_t first,
                      std::span<const SeenColumns> queries, const Executor& executor) {
  const Problem& problem = params.problem;
  const auto out_of = [&](std::int64_t n) {
    return params.scores.data + params.scores.offset(first + n);
  };
  std::int64_t begin = problem.s_k, end = 0;  // rows that some query sees
  for (std::size_t n = 0; n < queries.size(); ++n) {
    const SeenColumns& seen = queries[n];
    float* const out = out_of(static_cast<std::int64_t>(n));
    std::fill(out, out + seen.begin, -kInfinity);
    std::fill(out + seen.end, out + *params.width, -kInfinity);
    if (seen.begin == seen.end) continue;
    begin = std::min(begin, seen.start + seen.begin);
    end = std::max(end, seen.start + seen.end);
  }
  for (std::int64_t t = begin / kBlock * kBlock; t < end && !executor.stopped(); t += kBlock) {
    scorer.load_block(problem, t);
    for (std::size_t n = 0; n < queries.size(); ++n) {
      const SeenColumns& seen = queries[n];
      const std::int64_t from = std::max(seen.start + seen.begin, t);
      const std::int64_t to = std::min(seen.start + seen.end, t + kBlock);
      if (from >= to) continue;
      float scores[kBlock];
      scorer.score(problem, static_cast<std::int64_t>(n), scores);
      std::copy(scores + (from - t), scores + (to - t),
                out_of(static_cast<std::int64_t>(n)) + (from - seen.start));
    }
  }
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
    if (params.width.has_value()) {
      SeenColumns seen[kTogether];
      for (std::int64_t n = 0; n < count; ++n) seen[n] = seen_columns(params, first + n);
      const std::span queries = std::span(seen).first(static_cast<std::size_t>(count));
      score_from_start(params, scorer, first, queries, executor);
      return;
    }
    for (std::int64_t block = 0; block < blocks && !executor.stopped(); ++block) {
      if (dense) scorer.load_block(problem, block * kBlock);
      for (std::int64_t n = 0; n < count; ++n) {
        score_block(params, scorer, first + n, n, block * kBlock);
      }
    }
  });
}

}  // namespace winnow::indexer
