// Expert indices of the caller in 64 bits. Internal.
#pragma once

#include <cstdint>

#include "winnow/core/host_device.h"

namespace winnow::expert_parallel {

// The index in 32 bits, as tables have it. One that does not fit becomes the nearest that does,
// which names no expert either.
WINNOW_HOST_DEVICE constexpr std::int32_t narrow_index(std::int64_t index) {
  if (index < INT32_MIN) return INT32_MIN;
  return index > INT32_MAX ? INT32_MAX : static_cast<std::int32_t>(index);
}

}  // namespace winnow::expert_parallel
