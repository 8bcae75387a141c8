// Copies of a thread from global to shared memory that run beside it: cp.async. Device code only.
#pragma once

#include <cstdint>

namespace winnow::device {

// Begins to copy 16 bytes at multiples of 16, past L1.
__device__ __forceinline__ void cp_async(std::uint32_t destination, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(destination), "l"(source)
               : "memory");
}

// Closes a group of the copies that the thread began since the last one.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Until all groups but the last kPending are there, for this thread.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace winnow::device
