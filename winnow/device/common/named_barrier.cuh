// Barrier `number` (1 to 15; 0 is that of __syncthreads()) of kThreads threads of the block. Device
// code only.
#pragma once

#include <cstdint>

namespace winnow::device {

template <int kThreads>
__device__ __forceinline__ void bar_sync(std::uint32_t number) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(kThreads) : "memory");
}

// The same; true for all of them if `mine` is true for all.
template <int kThreads>
__device__ __forceinline__ bool barrier_red_and(std::uint32_t number, bool mine) {
  int all;
  asm volatile(
      "{\n.reg .pred mine, all;\nsetp.ne.s32 mine, %1, 0;\n"
      "barrier.cta.red.and.pred all, %2, %3, mine;\nselp.s32 %0, 1, 0, all;\n}"
      : "=r"(all)
      : "r"(static_cast<int>(mine)), "r"(number), "n"(kThreads)
      : "memory");
  return all != 0;
}

}  // namespace winnow::device
