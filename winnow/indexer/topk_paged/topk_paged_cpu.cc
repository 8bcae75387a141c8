// The choice of rows from a paged cache on the CPU: blocks of kPages pages are scored whole, and
// their visible rows are offered to a selection for each query.
#include <algorithm>
#include <limits>
#include <vector>

#include "winnow/indexer/topk/selection_cpu.h"
#include "winnow/indexer/topk_paged/paged_score_cpu.h"
#include "winnow/indexer/topk_paged/topk_paged_impl.h"

namespace winnow::indexer {
namespace {

constexpr std::int64_t kMostTogether = 8;  // queries of an item

// Queries [first, first + count) of sequence i, in part `part` of `parts` of its blocks.
struct Item {
  std::int64_t i, first, count, part, parts;
};

void choose(const TopkPagedParams& params, const Item& item, Scorer& scorer,
            std::vector<Selection>& selections, const Executor& executor) {
  std::int64_t visible[kMostTogether], rows = 0;
  for (std::int64_t n = 0; n < item.count; ++n) {
    visible[n] = params.visible(item.i, item.first + n);
    rows = std::max(rows, visible[n]);
  }
  const std::int64_t blocks = (rows + kBlock - 1) / kBlock;
  const std::int64_t begin = blocks * item.part / item.parts;
  const std::int64_t end = blocks * (item.part + 1) / item.parts;
  if (begin == end) return;
  const Problem problem = sequence_of(params, item.i);
  scorer.load_queries(problem, item.first, item.count);
  for (std::int64_t block = begin; block < end && !executor.stopped(); ++block) {
    PagesOfBlock pages;
    load_pages(params, item.i, block, rows, scorer, pages);
    for (std::int64_t n = 0; n < item.count; ++n) {
      const std::int64_t seen = visible[n] - block * kBlock;
      if (seen <= 0) continue;
      float scores[kBlock];
      scorer.score(problem, n, scores);
      for (std::int64_t p = 0; p < kPages && p * kPageRows < seen; ++p) {
        if (pages[p] == nullptr) continue;
        selections[static_cast<std::size_t>(n)].offer(scores, block * kBlock, p * kPageRows,
                                                      std::min((p + 1) * kPageRows, seen));
      }
    }
  }
}

// The slot of a position, by a second read of the table; -1 if another thread has made the entry
// invalid since.
std::int32_t slot_of(const TopkPagedParams& params, std::int64_t i, std::int32_t position) {
  const std::int64_t page =
      read_once(params.block_tables.data + params.block_tables.offset(i) + position / kPageRows);
  if (page < 0 || page >= params.num_pages) return -1;
  return static_cast<std::int32_t>(page * kPageRows + position % kPageRows);
}

void write_choice(const TopkPagedParams& params, std::int64_t i, std::int64_t j,
                  Selection& selection) {
  std::int32_t* const indices = params.indices.data + params.indices.offset(i, j);
  float* const scores =
      params.scores.present() ? params.scores.data + params.scores.offset(i, j) : nullptr;
  std::int64_t place = 0;
  for (const Candidate& candidate : selection.finish()) {
    indices[place] = params.positions ? candidate.row : slot_of(params, i, candidate.row);
    if (scores != nullptr) scores[place] = score_of(candidate.key);
    ++place;
  }
  params.length.data[params.length.offset(i, j)] = static_cast<std::int32_t>(place);
  for (; place < params.topk; ++place) {
    indices[place] = -1;
    if (scores != nullptr) scores[place] = -std::numeric_limits<float>::infinity();
  }
}

}  // namespace

void topk_paged_cpu(const TopkPagedParams& params, const Executor& executor) {
  const std::int64_t workers = executor.workers();
  const std::int64_t k =
      std::clamp<std::int64_t>(params.topk, 1, std::max<std::int64_t>(params.table * kPageRows, 1));
  // Queries of a sequence that share the loading of keys; fewer where their buffers are large.
  constexpr std::int64_t kBufferBytes = 1 << 20;
  const auto bytes = static_cast<std::int64_t>(Selection::capacity(k) * sizeof(Candidate));
  const std::int64_t together =
      std::min(params.s_q, std::clamp<std::int64_t>(kBufferBytes / bytes, 1, kMostTogether));
  const std::int64_t groups = (params.s_q + together - 1) / together;
  const std::int64_t all = params.b * groups;
  const std::int64_t parts = parts_of_rows(workers, all, (params.table + kPages - 1) / kPages);
  const std::int64_t buffers = parts > 1 ? all * parts : std::min(all, workers);
  std::vector<std::vector<Selection>> selections(static_cast<std::size_t>(buffers));
  for (std::vector<Selection>& group : selections) {
    for (std::int64_t n = 0; n < together; ++n) group.emplace_back(k, params.later_ties);
  }
  auto scorers =
      scratch_of_workers<Scorer>(executor, all * parts, sequence_of(params, 0), together);
  executor.for_each_range(all * parts, 1, [&](std::int64_t number, std::int64_t, int worker) {
    const std::int64_t group = number / parts, first = group % groups * together;
    const Item item{group / groups, first, std::min(together, params.s_q - first), number % parts,
                    parts};
    std::vector<Selection>& mine =
        selections[static_cast<std::size_t>(parts > 1 ? number : worker)];
    for (Selection& one : mine) one.clear();
    choose(params, item, scorers[static_cast<std::size_t>(worker)], mine, executor);
    for (std::int64_t n = 0; parts == 1 && n < item.count; ++n) {
      write_choice(params, item.i, first + n, mine[static_cast<std::size_t>(n)]);
    }
  });
  if (parts == 1) return;
  executor.for_each_range(params.b * params.s_q, 1, [&](std::int64_t query, std::int64_t, int) {
    const std::int64_t i = query / params.s_q, j = query % params.s_q;
    const std::int64_t group = (i * groups + j / together) * parts;
    const auto n = static_cast<std::size_t>(j % together);
    Selection& chosen = selections[static_cast<std::size_t>(group)][n];
    for (std::int64_t part = 1; part < parts; ++part) {
      chosen.take(selections[static_cast<std::size_t>(group + part)][n]);
    }
    write_choice(params, i, j, chosen);
  });
}

}  // namespace winnow::indexer
