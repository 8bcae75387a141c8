// The fields of any rank's descriptor (descriptor.h), from all ranks' inputs: int64, whatever the
// field's own type. Plain loops; it shares no code with the layer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "winnow/expert_parallel/all_to_all/all_to_all_oracle.h"

namespace winnow::expert_parallel::oracle {

// [NN, T, K]: the expert indices of rail source j; -1 beyond its tokens.
inline std::vector<std::int64_t> topk_indices(const World& world, int rank) {
  std::vector<std::int64_t> table;
  for (int j = 0; j < world.nodes(); ++j) {
    const int source = j * world.local_world_size + world.local(rank);
    for (std::int64_t t = 0; t < world.max_tokens; ++t) {
      for (int k = 0; k < world.topk; ++k) {
        table.push_back(t < world.tokens(source) ? world.expert(source, t, k) : -1);
      }
    }
  }
  return table;
}

// [NN, T, K]: the row of each pair of rail source j whose expert is on this node; else -1.
inline std::vector<std::int64_t> token_dst_scatter_idx(const World& world, int rank,
                                                       const std::vector<std::vector<Row>>& rows) {
  std::vector<std::int64_t> table;
  for (int j = 0; j < world.nodes(); ++j) {
    const int source = j * world.local_world_size + world.local(rank);
    for (std::int64_t t = 0; t < world.max_tokens; ++t) {
      for (int k = 0; k < world.topk; ++k) {
        const int d = t < world.tokens(source) ? world.home(source, t, k) : -1;
        const bool here = d >= 0 && world.node(d) == world.node(rank);
        table.push_back(here ? row_of(rows[std::size_t(d)], source, t, k) : -1);
      }
    }
  }
  return table;
}

// [NN, 2, T]: begin and end of the runs of consecutive tokens that rail source j sends to this
// node. A run ends at the end of its tile of 64 tokens. The runs of a tile are stored from the
// tile's first slot on; the other slots are -1.
inline std::vector<std::int64_t> send_requests(const World& world, int rank) {
  constexpr std::int64_t kTile = 64;
  std::vector<std::int64_t> table;
  for (int j = 0; j < world.nodes(); ++j) {
    const int source = j * world.local_world_size + world.local(rank);
    const std::int64_t n = world.tokens(source), slots = world.max_tokens;
    std::vector<std::int64_t> begin(std::size_t(slots), -1), end(std::size_t(slots), -1);
    for (std::int64_t tile = 0; tile < n; tile += kTile) {
      std::int64_t slot = tile - 1;
      bool open = false;
      for (std::int64_t t = tile; t < std::min(n, tile + kTile); ++t) {
        const bool goes = world.goes_to_node(source, t, world.node(rank));
        if (goes && !open) begin[std::size_t(++slot)] = t;
        if (goes) end[std::size_t(slot)] = t + 1;
        open = goes;
      }
    }
    table.insert(table.end(), begin.begin(), begin.end());
    table.insert(table.end(), end.begin(), end.end());
  }
  return table;
}

// [R]: the row of the first copy (lowest k) of the same token on this rank; -1 for padding.
inline std::vector<std::int64_t> first_copy(const World& world, int rank,
                                            const std::vector<Row>& rows) {
  std::vector<std::int64_t> map;
  for (const Row& row : rows) {
    map.push_back(-1);
    for (int k = 0; k < world.topk && row.source >= 0 && map.back() < 0; ++k) {
      if (world.home(row.source, row.token, k) == rank) {
        map.back() = row_of(rows, row.source, row.token, k);
      }
    }
  }
  return map;
}

// [R, K]: for first copies the row of pair k on this rank, or -1; -1 for all other rows.
inline std::vector<std::int64_t> copies(const World& world, int rank,
                                        const std::vector<Row>& rows) {
  const std::vector<std::int64_t> first = first_copy(world, rank, rows);
  std::vector<std::int64_t> map;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    for (int k = 0; k < world.topk; ++k) {
      const Row& row = rows[i];
      const bool listed = row.source >= 0 && first[i] == std::int64_t(i) &&
                          world.home(row.source, row.token, k) == rank;
      map.push_back(listed ? row_of(rows, row.source, row.token, k) : -1);
    }
  }
  return map;
}

}  // namespace winnow::expert_parallel::oracle
