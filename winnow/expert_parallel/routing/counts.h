// Counts of a rank's expert indices, which layout gives and a dispatch begins with. Internal.
#pragma once

#include <cstdint>
#include <optional>

#include "winnow/core/export.h"
#include "winnow/core/rows.h"

namespace winnow::expert_parallel {

// Outputs that are null are not computed.
struct LayoutParams {
  std::int64_t num_tokens = 0, topk = 0, experts = 0, world_size = 0, local_world_size = 0;
  Rows<const std::int32_t*> expert_indices;  // [n, K]
  std::int32_t* tokens_per_rank = nullptr;
  std::int32_t* tokens_per_node = nullptr;
  std::int32_t* tokens_per_expert = nullptr;
  Rows<std::uint8_t*> is_token_in_rank;  // [n, W]

  bool is_expert(std::int32_t index) const { return index >= 0 && index < experts; }
};

// An index that is neither an expert nor one of the two values for none.
struct BadIndex {
  std::int64_t token = 0, k = 0;
  std::int32_t value = 0;
};

// The first one in the order of tokens, then k.
WINNOW_EXPORT std::optional<BadIndex> find_bad_index(const LayoutParams& params);

// Counts; an index that is not an expert is ignored. Throws std::bad_alloc before it writes
// anything; an interrupt may end it later.
void count_layout(const LayoutParams& params);

}  // namespace winnow::expert_parallel
