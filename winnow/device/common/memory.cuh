// Global memory: loads and stores with cache hints, prefetches. Device code only.
#pragma once

#include <cstdint>

namespace winnow::device {

// 16 bytes that nobody on this GPU reads soon: evict first.
__device__ __forceinline__ void store_streaming(void* address, std::uint32_t a, std::uint32_t b,
                                                std::uint32_t c, std::uint32_t d) {
  asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

}  // namespace winnow::device
