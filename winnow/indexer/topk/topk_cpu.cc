// The choice of rows on the CPU. Up to kBuffered rows are chosen from a buffer of candidates above
// a bar that rises whenever the buffer is full; more by three passes over the scores, which find
// the k-th key by its upper and its lower half and then write, and need no buffer.
#include <algorithm>
#include <limits>
#include <span>
#include <vector>

#include "winnow/indexer/score_cpu.h"
#include "winnow/indexer/topk/selection_cpu.h"
#include "winnow/indexer/topk/topk_impl.h"

namespace winnow::indexer {
namespace {

constexpr std::int64_t kBuffered = 1 << 15;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Writes row `place` of a query's outputs.
void store(const TopkParams& params, std::int64_t i, std::int64_t place, std::int32_t row,
           float score) {
  params.indices.data[params.indices.offset(i) + place] = row;
  if (params.scores.present()) params.scores.data[params.scores.offset(i) + place] = score;
}
void finish_row(const TopkParams& params, std::int64_t i, std::int64_t length) {
  for (std::int64_t j = length; j < params.topk; ++j) store(params, i, j, -1, -kInfinity);
  params.length.data[params.length.offset(i)] = static_cast<std::int32_t>(length);
}
void write_choice(const TopkParams& params, std::int64_t i, Selection& selection) {
  std::int64_t place = 0;
  for (const Candidate& candidate : selection.finish()) {
    store(params, i, place++, candidate.row, score_of(candidate.key));
  }
  finish_row(params, i, place);
}

// Calls visit(n, scores, first, begin, end) for the blocks with rows that the queries from
// `first_query` on see, one for each range of `visible`, of part `part` of `parts`: rows
// first + [begin, end) are those that query n of them sees. Fewer where the call is to end.
template <class Visit>
void for_each_block(const Executor& executor, const Problem& problem, Scorer& scorer,
                    std::int64_t first_query, std::span<const RowRange> visible, std::int64_t part,
                    std::int64_t parts, const Visit& visit) {
  RowRange all{problem.s_k, 0};
  for (const RowRange& one : visible) {
    if (one.begin == one.end) continue;
    all = {std::min(all.begin, one.begin), std::max(all.end, one.end)};
  }
  if (all.begin >= all.end) return;
  const auto count = static_cast<std::int64_t>(visible.size());
  scorer.load_queries(problem, first_query, count);
  const std::int64_t first_block = all.begin / kBlock;
  const std::int64_t blocks = (all.end + kBlock - 1) / kBlock - first_block;
  for (std::int64_t b = first_block + blocks * part / parts;
       b < first_block + blocks * (part + 1) / parts && !executor.stopped(); ++b) {
    const std::int64_t first = b * kBlock;
    scorer.load_block(problem, first);
    for (std::int64_t n = 0; n < count; ++n) {
      const std::int64_t begin = std::max(visible[n].begin - first, std::int64_t{0});
      const std::int64_t end = std::min(visible[n].end - first, kBlock);
      if (begin >= end) continue;
      float scores[kBlock];
      scorer.score(problem, n, scores);
      visit(n, scores, first, begin, end);
    }
  }
}

void choose_buffered(const TopkParams& params, const Executor& executor) {
  const Problem& problem = params.problem;
  const std::int64_t workers = executor.workers();
  // Queries that share the loading of keys; fewer where there are few, or their buffers are large.
  constexpr std::int64_t kBufferBytes = 1 << 20;
  const auto bytes =
      static_cast<std::int64_t>(Selection::capacity(params.topk) * sizeof(Candidate));
  const std::int64_t together = std::clamp<std::int64_t>(
      std::min(kBufferBytes / bytes, (problem.s_q + workers - 1) / workers), 1, 8);
  const std::int64_t groups = (problem.s_q + together - 1) / together;
  const std::int64_t parts = parts_of_rows(workers, groups, (problem.s_k + kBlock - 1) / kBlock);
  const std::int64_t buffers = parts > 1 ? groups * parts : std::min(groups, workers);
  std::vector<std::vector<Selection>> selections(static_cast<std::size_t>(buffers));
  for (std::vector<Selection>& group : selections) {
    for (std::int64_t n = 0; n < together; ++n) group.emplace_back(params.topk, params.later_ties);
  }
  auto scorers = scratch_of_workers<Scorer>(executor, groups * parts, problem, together);
  executor.for_each_range(groups * parts, 1, [&](std::int64_t item, std::int64_t, int worker) {
    const std::int64_t first = item / parts * together;
    const std::int64_t count = std::min(together, problem.s_q - first);
    std::vector<Selection>& selection =
        selections[static_cast<std::size_t>(parts > 1 ? item : worker)];
    for (Selection& one : selection) one.clear();
    std::vector<RowRange> visible;
    for (std::int64_t n = 0; n < count; ++n) visible.push_back(problem.visible_rows(first + n));
    for_each_block(
        executor, problem, scorers[static_cast<std::size_t>(worker)], first, visible, item % parts,
        parts,
        [&](std::int64_t n, const float(&scores)[kBlock], std::int64_t row, std::int64_t begin,
            std::int64_t end) { selection[n].offer(scores, row, begin, end); });
    for (std::int64_t n = 0; parts == 1 && n < count; ++n) {
      write_choice(params, first + n, selection[n]);
    }
  });
  if (parts == 1) return;
  executor.for_each_range(problem.s_q, 1, [&](std::int64_t i, std::int64_t, int) {
    Selection& chosen = selections[i / together * parts][i % together];
    for (std::int64_t part = 1; part < parts; ++part) {
      chosen.take(selections[i / together * parts + part][i % together]);
    }
    write_choice(params, i, chosen);
  });
}

// How many of the best keys are wanted, and among which bins they end.
struct Histogram {
  std::vector<std::uint32_t> counts = std::vector<std::uint32_t>(1 << 16);
  void clear() { std::fill(counts.begin(), counts.end(), 0); }
  // The bin of the `wanted`-th best; takes what lies above it off `wanted`.
  std::uint32_t find(std::int64_t& wanted) const {
    for (std::uint32_t bin = (1 << 16) - 1;; --bin) {
      if (counts[bin] >= wanted || bin == 0) return bin;
      wanted -= counts[bin];
    }
  }
};

void choose_by_passes(const TopkParams& params, std::int64_t i, Scorer& scorer,
                      Histogram& histogram, const Executor& executor) {
  const Problem& problem = params.problem;
  const RowRange visible = problem.visible_rows(i);
  const auto for_each_key = [&](const auto& visit) {
    for_each_block(executor, problem, scorer, i, {&visible, 1}, 0, 1,
                   [&](std::int64_t, const float(&scores)[kBlock], std::int64_t first,
                       std::int64_t begin, std::int64_t end) {
                     for (std::int64_t r = begin; r < end; ++r) visit(key_of(scores[r]), first + r);
                   });
  };
  std::uint32_t cut = 0;
  std::int64_t wanted = visible.end - visible.begin, equal = wanted;  // of the key `cut`
  if (wanted > params.topk) {
    wanted = params.topk;
    histogram.clear();
    for_each_key([&](std::uint32_t key, std::int64_t) { ++histogram.counts[key >> 16]; });
    cut = histogram.find(wanted) << 16;
    histogram.clear();
    for_each_key([&](std::uint32_t key, std::int64_t) {
      if (key >> 16 == cut >> 16) ++histogram.counts[key & 0xffff];
    });
    cut |= histogram.find(wanted);
    equal = histogram.counts[cut & 0xffff];
  } else {
    for_each_key([&](std::uint32_t key, std::int64_t) { equal -= key != 0; });
    wanted = equal;
  }
  const std::int64_t first_equal = params.later_ties ? equal - wanted : 0;
  std::int64_t place = 0, met = 0;
  for_each_key([&](std::uint32_t key, std::int64_t row) {
    bool chosen = key > cut;
    if (key == cut) {
      chosen = met >= first_equal && met < first_equal + wanted;
      ++met;
    }
    // More than topk, too, where another thread has rewritten what is scored since it was counted.
    if (chosen && place < params.topk) {
      store(params, i, place++, static_cast<std::int32_t>(row), score_of(key));
    }
  });
  finish_row(params, i, place);
}

}  // namespace

void topk_cpu(const TopkParams& params, const Executor& executor) {
  if (params.topk <= kBuffered) return choose_buffered(params, executor);
  const std::int64_t queries = params.problem.s_q;
  auto scorers = scratch_of_workers<Scorer>(executor, queries, params.problem, 1);
  auto histograms = scratch_of_workers<Histogram>(executor, queries);
  executor.for_each_range(queries, 1, [&](std::int64_t i, std::int64_t, int worker) {
    choose_by_passes(params, i, scorers[static_cast<std::size_t>(worker)],
                     histograms[static_cast<std::size_t>(worker)], executor);
  });
}

}  // namespace winnow::indexer
