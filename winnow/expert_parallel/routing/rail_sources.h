// The tokens that a rank passes on inside its node: its own and those of its rail. Internal.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "winnow/expert_parallel/routing/placement.h"
#include "winnow/expert_parallel/routing/routing.h"

namespace winnow::expert_parallel {

// A view of a routing by the nodes of the rail sources.
class RailSources {
 public:
  RailSources(const ExpertMap& map, const Routing& routing, int local)
      : map_(map), routing_(routing), local_(local) {}

  int rank(int node) const { return map_.topology.rank(node, local_); }
  std::int64_t tokens(int node) const {
    return routing_.tokens_per_rank[static_cast<std::size_t>(rank(node))];
  }
  // [n, K].
  std::span<const std::int32_t> indices(int node) const {
    return {routing_.indices.data() + routing_.table_offset(node),
            static_cast<std::size_t>(tokens(node) * routing_.topk)};
  }
  // Where pair (token, 0) stands in tables [NN, T, K].
  std::size_t pair(int node, std::int64_t token) const {
    return routing_.table_offset(node) + static_cast<std::size_t>(token * routing_.topk);
  }
  std::int64_t chunks(int node) const { return (tokens(node) + kChunkTokens - 1) / kChunkTokens; }
  std::int64_t most_chunks() const {
    std::int64_t most = 0;
    for (int node = 0; node < map_.topology.nodes(); ++node) most = std::max(most, chunks(node));
    return most;
  }
  // visit(Run) for the tokens of a chunk of the source on `from` that have an expert on `to`.
  template <class Visit>
  void for_each_run_of(int from, std::int64_t chunk, int to, const Visit& visit) const {
    const std::int64_t begin = chunk * kChunkTokens;
    for_each_run(map_, indices(from).data(), to, begin,
                 std::min(tokens(from), begin + kChunkTokens), visit);
  }

 private:
  const ExpertMap& map_;
  const Routing& routing_;
  int local_;
};

}  // namespace winnow::expert_parallel
