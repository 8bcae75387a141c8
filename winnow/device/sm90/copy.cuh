// Bulk copies between global and shared memory.
#pragma once

#include <cstdint>

#include "winnow/device/common/copy.cuh"

namespace winnow::device {

// Asks L2 to fetch `bytes` (a multiple of 16) from `source` (aligned to 16). One thread.
__device__ __forceinline__ void bulk_prefetch_l2(const void* source, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes) : "memory");
}

// Copies `bytes` (a multiple of 16) of global memory to shared memory, which reports them to
// `barrier` (mbarrier_arrive_expect()). One thread.
__device__ __forceinline__ void bulk_load(std::uint32_t destination, const void* source,
                                          std::uint32_t bytes, std::uint32_t barrier,
                                          std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], %2, [%3], %4;" ::"r"(destination),
      "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// Stores `bytes` (a multiple of 16) of shared memory to global memory. One thread; the writers of
// the shared memory must have done fence_proxy_async_shared() before a barrier with this thread.
__device__ __forceinline__ void bulk_store(void* destination, std::uint32_t source,
                                           std::uint32_t bytes, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(
          destination),
      "r"(source), "r"(bytes), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until at most kPending of this thread's bulk groups still read shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Until at most kPending of this thread's bulk groups are incomplete.
template <int kPending>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace winnow::device
