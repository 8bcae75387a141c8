// What the compiler may know of a value in a register. No instruction comes of it, or one move.
// Device code only.
#pragma once

#include <cstdint>

namespace winnow::device {

// The value, of which the compiler does not know any more how it came about: what follows from it
// is computed anew, instead of being kept in registers from an earlier computation.
__device__ __forceinline__ std::uint32_t forget(std::uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

// The value, which the compiler keeps in a register instead of computing it again.
__device__ __forceinline__ std::uint32_t keep_in_register(std::uint32_t value) {
  asm volatile("mov.u32 %0, %0;" : "+r"(value));
  return value;
}

}  // namespace winnow::device
