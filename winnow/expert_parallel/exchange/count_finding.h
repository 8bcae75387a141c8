// What is wrong with the counts that a rank gives to notify. Internal.
#pragma once

#include <cstdint>

namespace winnow::expert_parallel {

enum class CountFault : std::int32_t { none, tokens_of_rank, tokens_of_node, negative, pairs };

struct CountFinding {
  CountFault fault;
  std::int32_t index;        // the rank, node or expert
  std::int64_t wanted, got;  // pairs: tokens of the rank, pairs
};

}  // namespace winnow::expert_parallel
