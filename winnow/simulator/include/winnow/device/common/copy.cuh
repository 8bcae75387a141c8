// Host half of winnow/device/common/copy.cuh.
#pragma once

#include <cstdint>

#include "winnow/simulator/engine.h"

namespace winnow::device {

using simulator::Where;

inline std::uint64_t policy_evict_last() { return 1; }
inline std::uint64_t policy_evict_first() { return 2; }
inline std::uint64_t policy_evict_normal() { return 3; }

template <int kFetched = 256>
void cp_async_zfill(std::uint32_t destination, const void* source, bool valid, std::uint64_t,
                    Where where = Where::current()) {
  simulator::copy_async({destination, 16, 0, valid ? 16 : 0, source}, where);
}
inline void cp_async_zfill(std::uint32_t destination, const void* source, bool valid,
                           Where where = Where::current()) {
  simulator::copy_async({destination, 16, 0, valid ? 16 : 0, source}, where);
}
inline void cp_async_word_zfill(std::uint32_t destination, const void* source, bool valid,
                                Where where = Where::current()) {
  simulator::copy_async({destination, 4, 0, valid ? 4 : 0, source}, where);
}
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
