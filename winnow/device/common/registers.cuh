// Special registers, and what the compiler may know of a value in a register. Device code only.
#pragma once

#include <cstdint>

namespace winnow::device {

// Nanoseconds of the clock that all of the GPU's multiprocessors share.
__device__ __forceinline__ std::uint64_t globaltimer() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// The value, of which the compiler does not know any more how it came about: what follows from it
// is computed anew, instead of being kept in registers from an earlier computation.
__device__ __forceinline__ std::uint32_t forget(std::uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}
// An address is then computed once, and constants behind it are part of the instructions.
__device__ __forceinline__ const char* forget(const char* address) {
  asm volatile("" : "+l"(address));
  return address;
}

// The value, which the compiler keeps in a register instead of computing it again.
__device__ __forceinline__ std::uint32_t keep_in_register(std::uint32_t value) {
  asm volatile("mov.u32 %0, %0;" : "+r"(value));
  return value;
}

}  // namespace winnow::device
