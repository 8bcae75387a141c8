// Scores of all rows of a paged cache on the CPU: an item is a block of rows and up to
// kMostTogether queries of a sequence.
#include <algorithm>
#include <limits>

#include "winnow/indexer/scores_paged/scores_paged_impl.h"
#include "winnow/indexer/topk_paged/paged_score_cpu.h"

namespace winnow::indexer {
namespace {

constexpr std::int64_t kMostTogether = 8;

// Scores of rows [first, first + kBlock) for queries [begin, begin + count) of sequence i.
void score_block(const ScoresPagedParams& params, Scorer& scorer, std::int64_t i,
                 std::int64_t begin, std::int64_t count, std::int64_t first) {
  std::int64_t visible[kMostTogether], rows = 0;
  for (std::int64_t n = 0; n < count; ++n) {
    visible[n] = params.visible(i, begin + n);
    rows = std::max(rows, visible[n]);
  }
  const Problem problem = sequence_of(params, i);
  PagesOfBlock pages{};
  if (first < rows) {
    scorer.load_queries(problem, begin, count);
    load_pages(params, i, first / kBlock, rows, scorer, pages);
  }
  const std::int64_t columns = std::min(kBlock, params.max_context - first);
  for (std::int64_t n = 0; n < count; ++n) {
    float* const out = params.scores.data + params.scores.offset(i, begin + n) + first;
    const std::int64_t seen = std::clamp<std::int64_t>(visible[n] - first, 0, columns);
    float scores[kBlock];
    if (seen > 0) scorer.score(problem, n, scores);
    for (std::int64_t r = 0; r < (params.clean ? columns : seen); ++r) {
      const bool present = r < seen && pages[r / kPageRows] != nullptr;
      out[r] = present ? scores[r] : -std::numeric_limits<float>::infinity();
    }
  }
}

}  // namespace

void scores_paged_cpu(const ScoresPagedParams& params, const Executor& executor) {
  const std::int64_t together = std::min(params.s_q, kMostTogether);
  const std::int64_t groups = (params.s_q + together - 1) / together;
  const std::int64_t blocks = (params.max_context + kBlock - 1) / kBlock;
  const std::int64_t items = params.b * groups * blocks;
  auto scorers = scratch_of_workers<Scorer>(executor, items, sequence_of(params, 0), together);
  const auto score = [&](std::int64_t item, std::int64_t, int worker) {
    const std::int64_t group = item / blocks, begin = group % groups * together;
    score_block(params, scorers[static_cast<std::size_t>(worker)], group / groups, begin,
                std::min(together, params.s_q - begin), item % blocks * kBlock);
  };
  executor.for_each_range(items, 1, score);
}

}  // namespace winnow::indexer
