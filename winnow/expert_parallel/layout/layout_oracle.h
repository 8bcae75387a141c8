// The oracle of expert_parallel::layout: counts each token by the sets of its ranks and nodes. It
// shares no code with any backend.
#pragma once

#include <cstdint>
#include <set>
#include <vector>

#include "winnow/core/tensor.h"

namespace winnow::expert_parallel::oracle {

struct Layout {
  std::vector<double> tokens_per_rank, tokens_per_node, tokens_per_expert;
  std::vector<double> is_token_in_rank;  // [n, W]
};

inline Layout layout(const ConstTensorView& expert_indices, std::int64_t experts,
                     std::int64_t world_size, std::int64_t local_world_size) {
  Layout result;
  result.tokens_per_rank.resize(static_cast<std::size_t>(world_size));
  result.tokens_per_node.resize(static_cast<std::size_t>(world_size / local_world_size));
  result.tokens_per_expert.resize(static_cast<std::size_t>(experts));
  for (std::int64_t t = 0; t < expert_indices.size(0); ++t) {
    std::set<std::int64_t> ranks, nodes;
    for (std::int64_t k = 0; k < expert_indices.size(1); ++k) {
      const std::int64_t expert = expert_indices.at<std::int32_t>(t, k);
      if (expert == -1 || expert == experts) continue;
      result.tokens_per_expert.at(static_cast<std::size_t>(expert)) += 1;
      ranks.insert(expert * world_size / experts);
    }
    for (const std::int64_t rank : ranks) nodes.insert(rank / local_world_size);
    for (const std::int64_t rank : ranks) {
      result.tokens_per_rank[static_cast<std::size_t>(rank)] += 1;
    }
    for (const std::int64_t node : nodes) {
      result.tokens_per_node[static_cast<std::size_t>(node)] += 1;
    }
    for (std::int64_t rank = 0; rank < world_size; ++rank) {
      result.is_token_in_rank.push_back(ranks.contains(rank) ? 1 : 0);
    }
  }
  return result;
}

}  // namespace winnow::expert_parallel::oracle
