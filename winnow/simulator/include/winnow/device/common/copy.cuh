// Host half of winnow/device/common/copy.cuh.
#pragma once

#include <cstdint>

#include "winnow/simulator/engine.h"

namespace winnow::device {

using simulator::Where;

inline void cp_async(std::uint32_t destination, const void* source,
                     Where where = Where::current()) {
  simulator::copy_async({destination, 16, 0, 16, source}, where);
}
inline void cp_async_commit(Where where = Where::current()) { simulator::copies_commit(where); }
template <int kPending>
void cp_async_wait(Where where = Where::current()) {
  simulator::copies_wait(kPending, where);
}

}  // namespace winnow::device
