// What a rank says to all others about its call of notify. Internal.
#pragma once

#include <cstdint>

namespace winnow::expert_parallel {

// Zeros: nothing to object to.
struct Statement {
  std::int64_t refusal;  // 0: none, else 1 + ErrorCode
  std::int64_t channels;
  char text[496];  // why, ends with '\0'
};
static_assert(sizeof(Statement) == 512);

}  // namespace winnow::expert_parallel
