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
template <int kThreads>
bool barrier_red_and(std::uint32_t number, bool mine, Where where = Where::current()) {
  return simulator::named_barrier("red.and", number, kThreads, mine, where);
}

}  // namespace winnow::device
