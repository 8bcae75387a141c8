#include "winnow/expert_parallel/routing/counts.h"

#include <algorithm>
#include <vector>

#include "winnow/core/interrupt.h"
#include "winnow/core/read_once.h"

namespace winnow::expert_parallel {
namespace {

// Counts that may be absent: they are then counted in memory of their own and dropped.
class Counts {
 public:
  Counts(std::int32_t* wanted, std::int64_t size)
      : unseen_(wanted == nullptr ? static_cast<std::size_t>(size) : 0),
        counts_(wanted == nullptr ? unseen_.data() : wanted),
        size_(size) {}
  void clear() { std::fill_n(counts_, size_, 0); }
  void add(std::int64_t index) { ++counts_[index]; }

 private:
  std::vector<std::int32_t> unseen_;
  std::int32_t* counts_;
  std::int64_t size_;
};

}  // namespace

std::optional<BadIndex> find_bad_index(const LayoutParams& params) {
  Interrupts interrupts;
  for (std::int64_t token = 0; token < params.num_tokens; ++token) {
    interrupts.step();
    const std::int32_t* row = params.expert_indices.data + params.expert_indices.offset(token);
    for (std::int64_t k = 0; k < params.topk; ++k) {
      const std::int32_t index = read_once(row + k);
      if (index < -1 || index > params.experts) return BadIndex{token, k, index};
    }
  }
  return std::nullopt;
}

void count_layout(const LayoutParams& params) {
  const std::int64_t nodes = params.world_size / params.local_world_size;
  const auto experts_per_rank = static_cast<std::int32_t>(params.experts / params.world_size);
  const auto ranks_per_node = static_cast<std::int32_t>(params.local_world_size);
  Counts per_rank(params.tokens_per_rank, params.world_size);
  Counts per_node(params.tokens_per_node, nodes);
  Counts per_expert(params.tokens_per_expert, params.experts);
  // The last token that was counted for a rank or node, so that each token counts once.
  std::vector<std::int64_t> last_in_rank(static_cast<std::size_t>(params.world_size), -1);
  std::vector<std::int64_t> last_in_node(static_cast<std::size_t>(nodes), -1);
  per_rank.clear();
  per_node.clear();
  per_expert.clear();

  Interrupts interrupts;
  for (std::int64_t token = 0; token < params.num_tokens; ++token) {
    interrupts.step();
    const std::int32_t* indices = params.expert_indices.data + params.expert_indices.offset(token);
    std::uint8_t* in_rank = nullptr;
    if (params.is_token_in_rank.present()) {
      in_rank = params.is_token_in_rank.data + params.is_token_in_rank.offset(token);
      std::fill_n(in_rank, params.world_size, std::uint8_t{0});
    }
    for (std::int64_t k = 0; k < params.topk; ++k) {
      const std::int32_t index = read_once(indices + k);
      if (!params.is_expert(index)) continue;
      per_expert.add(index);
      const std::int32_t rank = index / experts_per_rank;
      if (last_in_rank[static_cast<std::size_t>(rank)] == token) continue;
      last_in_rank[static_cast<std::size_t>(rank)] = token;
      per_rank.add(rank);
      if (in_rank != nullptr) in_rank[rank] = 1;
      const std::int32_t node = rank / ranks_per_node;
      if (last_in_node[static_cast<std::size_t>(node)] == token) continue;
      last_in_node[static_cast<std::size_t>(node)] = token;
      per_node.add(node);
    }
  }
}

}  // namespace winnow::expert_parallel
