// Which row every (token, k) pair gets: pure functions of index tables and counts, so that every
// rank that knows the counts finds the same rows. Internal.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "winnow/core/export.h"
#include "winnow/expert_parallel/config.h"
#include "winnow/expert_parallel/routing/counts.h"
#include "winnow/expert_parallel/routing/topology.h"

namespace winnow::expert_parallel {

// Tokens that travel between nodes under one signal; runs of tokens end at its multiples.
inline constexpr std::int64_t kChunkTokens = 64;

// Where experts live. An index outside [0, experts) lives nowhere: its pair is dropped.
struct ExpertMap {
  Topology topology;
  int experts = 0;  // E
  int topk = 0;     // K

  int per_rank() const { return experts / topology.world_size; }
  bool kept(std::int32_t expert) const { return expert >= 0 && expert < experts; }
  int rank_of(std::int32_t expert) const { return kept(expert) ? expert / per_rank() : -1; }
  int node_of(std::int32_t expert) const {
    return kept(expert) ? expert / (per_rank() * topology.local_world_size) : -1;
  }
};

// For the functions of layout: one rank's indices [n, K], and no outputs yet.
WINNOW_EXPORT LayoutParams layout_params(const ExpertMap& map,
                                         std::span<const std::int32_t> indices);

// What a rank tells the others about its tokens.
struct PairCounts {
  std::vector<std::int32_t> pairs;   // [E] pairs of each expert
  std::vector<std::int32_t> tokens;  // [W] tokens with an expert on each rank
  std::vector<std::int32_t> nodes;  // [NN] tokens with an expert on each node; of notify, else none
};
WINNOW_EXPORT PairCounts count_pairs(const ExpertMap& map, std::span<const std::int32_t> indices);

// The counts of all ranks, as received.
struct WorldCounts {
  std::vector<const std::int32_t*> pairs;   // [W] -> [E]
  std::vector<const std::int32_t*> tokens;  // [W] -> [W]
  std::vector<const std::int32_t*> nodes;   // [W] -> [NN]; of notify, else of no meaning
};

// Where the rows of a dispatch begin, as one rank sees it.
struct Placement {
  RowOrder order = RowOrder::expert_major;
  std::vector<std::int64_t> rank_rows;       // [W] rows of each rank, padding included
  std::vector<std::int32_t> expert_counts;   // [E/W] pairs of this rank's experts
  std::vector<std::int64_t> expert_offsets;  // [E/W + 1] their first rows; see Descriptor
  // [W + 1], token-major only: where the rows of each source begin on this rank.
  std::vector<std::int64_t> source_begins;
  // For each rail source the first row of its block, by expert of this node (expert-major) or by
  // rank of this node (token-major).
  std::vector<std::vector<std::int64_t>> first_rows;  // [NN] -> [E/NN] or [L]
};
WINNOW_EXPORT Placement place_blocks(const ExpertMap& map, const WorldCounts& counts,
                                     RowOrder order, std::int64_t alignment, int rank);

// The rows of the pairs [n, K] of rail source `source_node` whose expert lives on node `node`; -1
// for the others and for rows from `limit` on.
WINNOW_EXPORT void place_pairs(const ExpertMap& map, const Placement& placement, int source_node,
                               int node, std::int64_t limit, std::span<const std::int32_t> indices,
                               std::span<std::int32_t> rows);

// A run of consecutive tokens.
struct Run {
  std::int64_t first, last;  // last is exclusive
};

// Calls visit(Run) for the longest runs of tokens in [begin, end) that have an expert on `node`.
template <class Visit>
void for_each_run(const ExpertMap& map, const std::int32_t* indices, int node, std::int64_t begin,
                  std::int64_t end, const Visit& visit) {
  const auto wanted = [&](std::int64_t token) {
    const std::int32_t* experts = indices + token * map.topk;
    return std::any_of(experts, experts + map.topk,
                       [&](std::int32_t expert) { return map.node_of(expert) == node; });
  };
  for (std::int64_t token = begin; token < end; ++token) {
    if (!wanted(token)) continue;
    const std::int64_t first = token;
    while (++token < end && wanted(token)) continue;
    visit(Run{first, token});
  }
}

// The runs that a rail source sends to `node`, in the layout of Descriptor::send_reqs_recv:
// begins[T] and ends[T], both filled with -1 before.
WINNOW_EXPORT void list_runs(const ExpertMap& map, std::span<const std::int32_t> indices, int node,
                             std::span<std::int32_t> begins, std::span<std::int32_t> ends);

}  // namespace winnow::expert_parallel
