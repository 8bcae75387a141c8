// The routing of a dispatch, which descriptors keep. Internal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "winnow/core/device.h"
#include "winnow/expert_parallel/config.h"
#include "winnow/expert_parallel/routing/tables.h"

namespace winnow::expert_parallel {

class Region;

// The routing of one counted dispatch, shared by the descriptors that repeat it. See Descriptor for
// the meaning and layout of the tables. On a GPU they are in `tables`, and on the host there are
// only wanted_rows, tokens_per_rank, expert_counts and expert_offsets: empty in the worst case,
// whose counts the host does not wait for.
struct Routing {
  std::uint64_t number = 0;  // the epoch of the dispatch: the same on every rank
  RowOrder order = RowOrder::expert_major;
  std::int64_t expert_alignment = 1, worst_case_rows = 0;
  std::int64_t world = 1, nodes = 1, max_tokens = 0, topk = 1;
  std::int64_t experts_per_rank = 0;
  std::int64_t tokens = 0;                    // n of this rank
  std::vector<std::int64_t> wanted_rows;      // [W], as the routing asks
  std::vector<std::int32_t> tokens_per_rank;  // [W]
  std::vector<std::int32_t> source_begins;    // [W + 1]; empty in expert-major order
  std::vector<std::int32_t> send_reqs;        // [NN, 2, T]; empty on one node
  std::vector<std::int32_t> indices;          // [NN, T, K]
  std::vector<std::int32_t> rows;             // [NN, T, K]
  std::vector<std::int64_t> first_copies;     // [R]
  std::vector<std::int64_t> copies;           // [R, K]
  std::vector<std::int32_t> expert_counts;    // [E/W]
  std::vector<std::int32_t> expert_offsets;   // [E/W + 1]

  // On a GPU, and the memory of its tables.
  Device device{};
  RoutingTables tables;
  std::vector<std::shared_ptr<Region>> memory;

  // R of a rank.
  std::int64_t rows_of(int rank) const {
    return worst_case_rows > 0 ? worst_case_rows : wanted_rows[static_cast<std::size_t>(rank)];
  }
  std::size_t table_offset(int node) const {  // elements
    return static_cast<std::size_t>(node * max_tokens * topk);
  }
};

}  // namespace winnow::expert_parallel
