#include "winnow/expert_parallel/routing/placement.h"

namespace winnow::expert_parallel {
namespace {

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

LayoutParams layout_params(const ExpertMap& map, std::span<const std::int32_t> indices) {
  LayoutParams params;
  params.num_tokens = static_cast<std::int64_t>(indices.size()) / map.topk;
  params.topk = map.topk;
  params.experts = map.experts;
  params.world_size = map.topology.world_size;
  params.local_world_size = map.topology.local_world_size;
  params.expert_indices.data = indices.data();
  params.expert_indices.stride0 = map.topk;
  return params;
}

PairCounts count_pairs(const ExpertMap& map, std::span<const std::int32_t> indices) {
  PairCounts counts;
  counts.pairs.resize(static_cast<std::size_t>(map.experts));
  counts.tokens.resize(static_cast<std::size_t>(map.topology.world_size));
  LayoutParams params = layout_params(map, indices);
  params.tokens_per_expert = counts.pairs.data();
  params.tokens_per_rank = counts.tokens.data();
  count_layout(params);
  return counts;
}

Placement place_blocks(const ExpertMap& map, const WorldCounts& counts, RowOrder order,
                       std::int64_t alignment, int rank) {
  const Topology& topology = map.topology;
  const int world = topology.world_size, per_rank = map.per_rank();
  const int node = topology.node(rank), local = topology.local(rank);
  Placement placement;
  placement.order = order;
  placement.rank_rows.assign(std::size_t(world), 0);
  const int blocks = order == RowOrder::expert_major ? per_rank : 1;  // of each source on a rank
  placement.first_rows.assign(
      std::size_t(topology.nodes()),
      std::vector<std::int64_t>(std::size_t(topology.local_world_size * blocks), 0));
  // Token-major rows are one block per rank, whose counts are `tokens`.
  const auto count = [&](int source, int destination, int block) -> std::int64_t {
    return order == RowOrder::expert_major
               ? counts.pairs[std::size_t(source)][destination * per_rank + block]
               : counts.tokens[std::size_t(source)][destination];
  };
  for (int destination = 0; destination < world; ++destination) {
    std::int64_t row = 0;
    for (int block = 0; block < blocks; ++block) {
      for (int source = 0; source < world; ++source) {
        if (topology.node(destination) == node && topology.local(source) == local) {
          const int here = topology.local(destination) * blocks + block;
          placement.first_rows[std::size_t(topology.node(source))][std::size_t(here)] = row;
        }
        if (destination == rank && order == RowOrder::token_major) {
          placement.source_begins.push_back(row);
        }
        row += count(source, destination, block);
      }
      row = round_up(row, alignment);
    }
    placement.rank_rows[std::size_t(destination)] = row;
  }

  if (order == RowOrder::token_major) {
    placement.source_begins.push_back(placement.rank_rows[std::size_t(rank)]);
  }

  placement.expert_offsets.push_back(0);
  for (int block = 0; block < per_rank; ++block) {
    std::int64_t pairs = 0;
    for (int source = 0; source < world; ++source) {
      pairs += counts.pairs[std::size_t(source)][rank * per_rank + block];
    }
    placement.expert_counts.push_back(static_cast<std::int32_t>(pairs));
    placement.expert_offsets.push_back(placement.expert_offsets.back() +
                                       round_up(pairs, alignment));
  }
  return placement;
}

void place_pairs(const ExpertMap& map, const Placement& placement, int source_node, int node,
                 std::int64_t limit, std::span<const std::int32_t> indices,
                 std::span<std::int32_t> rows) {
  const bool by_expert = placement.order == RowOrder::expert_major;
  const std::int32_t first_block =
      node * map.topology.local_world_size * (by_expert ? map.per_rank() : 1);
  std::vector<std::int64_t> next = placement.first_rows[std::size_t(source_node)];
  std::vector<std::int64_t> last_token(next.size(), -1);  // token-major: placed last in each block
  for (std::size_t i = 0; i < indices.size(); ++i) {
    rows[i] = -1;
    if (map.node_of(indices[i]) != node) continue;
    const auto block =
        static_cast<std::size_t>((by_expert ? indices[i] : map.rank_of(indices[i])) - first_block);
    const auto token = static_cast<std::int64_t>(i) / map.topk;
    // Pairs of one token on one rank share their row in token-major order.
    const bool shares = !by_expert && last_token[block] == token;
    const std::int64_t row = shares ? next[block] - 1 : next[block]++;
    last_token[block] = token;
    if (row < limit) rows[i] = static_cast<std::int32_t>(row);
  }
}

void list_runs(const ExpertMap& map, std::span<const std::int32_t> indices, int node,
               std::span<std::int32_t> begins, std::span<std::int32_t> ends) {
  const std::int64_t tokens = static_cast<std::int64_t>(indices.size()) / map.topk;
  for (std::int64_t chunk = 0; chunk < tokens; chunk += kChunkTokens) {
    auto slot = static_cast<std::size_t>(chunk);
    for_each_run(map, indices.data(), node, chunk, std::min(tokens, chunk + kChunkTokens),
                 [&](const Run& run) {
                   begins[slot] = static_cast<std::int32_t>(run.first);
                   ends[slot++] = static_cast<std::int32_t>(run.last);
                 });
  }
}

}  // namespace winnow::expert_parallel
