// Host half of winnow/device/common/named_barrier.cuh.
#pragma once

#include <cstdint>

#include "winnow/simulator/engine.h"

namespace winnow::device {

using simulator::Where;

template <int kThreads>
void bar_sync(std::uint32_t number, Where where = Where::current()) {
  simulator::named_barrier("sync", number, kThreads, true, where);
}
template <int kNumber, int kThreads>
bool barrier_red_and(bool mine, Where where = Where::current()) {
  return simulator::named_barrier("red.and", kNumber, kThreads, mine, where);
}

}  // namespace winnow::device
