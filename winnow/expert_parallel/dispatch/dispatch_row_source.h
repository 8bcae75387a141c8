// What stands beside each row of a new expert-major routing. Internal.
#pragma once

#include <cstdint>

namespace winnow::expert_parallel {

// Where a row came from.
struct RowSource {
  std::int32_t rank = -1;  // -1: padding
  std::int32_t token = -1;
  std::int32_t k = -1;
  std::int32_t first = -1;  // the row of the token's first pair on the same rank
};

}  // namespace winnow::expert_parallel
