// Host half of winnow/device/common/kernel_order.cuh.
#pragma once

#include "winnow/simulator/engine.h"

namespace winnow::device {

using simulator::Where;

inline void allow_next_kernel(Where where = Where::current()) {
  simulator::allow_next_kernel(where);
}
inline void wait_for_kernel_before(Where where = Where::current()) {
  simulator::wait_for_kernel_before(where);
}
inline void wait_for_kernel_before(const void* address, Where where = Where::current()) {
  if (address != nullptr) simulator::wait_for_kernel_before(where);
}

}  // namespace winnow::device
