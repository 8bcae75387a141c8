// Rules of the copies that name no tensor: cp.async, cp.async.bulk and its prefetch.
#pragma once

#include <cstdint>
#include <string>

#include "winnow/simulator/instructions/misuse.h"

namespace winnow::simulator {

// cp.async of 16 bytes. Throws Misuse "cp.async".
inline void check_cp_async(std::uint32_t shared, const void* global, int size = 16) {
  require_aligned(shared, static_cast<std::uint32_t>(size), "cp.async",
                  "the address in shared memory");
  require_aligned(reinterpret_cast<std::uintptr_t>(global), static_cast<std::uint32_t>(size),
                  "cp.async", "the address in global memory");
}

// cp.async.bulk.prefetch.L2. Throws Misuse "bulk copy".
inline void check_bulk_prefetch(const void* global, std::uint32_t bytes) {
  require_aligned(reinterpret_cast<std::uintptr_t>(global), 16, "bulk copy",
                  "the address in global memory");
  require(bytes % 16 == 0, "bulk copy",
          [&] { return std::to_string(bytes) + " bytes, which is no multiple of 16"; });
}

// cp.async.bulk between global and shared memory, in either direction. Throws Misuse "bulk copy".
inline void check_bulk_copy(std::uint32_t shared, const void* global, std::uint32_t bytes) {
  require_aligned(shared, 16, "bulk copy", "the address in shared memory");
  check_bulk_prefetch(global, bytes);
}

}  // namespace winnow::simulator
