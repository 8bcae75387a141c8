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

// 16 bytes that this SM reads once: they pass the L1 cache by. Loads keep their order among
// themselves. The address is a multiple of 16.
__device__ __forceinline__ uint4 load_past_l1(const void* address) {
  uint4 word;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "l"(address));
  return word;
}

__device__ __forceinline__ uint4 load_once(const void* address) {
  uint4 word;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "l"(address));
  return word;
}

}  // namespace winnow::device
