// Copies between global and shared memory: cp.async with zero fill, bulk copies, L2 policies.
#pragma once

#include <cstdint>

namespace winnow::device {

// L2 eviction policies, passed to the copies below.
__device__ __forceinline__ std::uint64_t policy_evict_last() {
  std::uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ std::uint64_t policy_evict_first() {
  std::uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ std::uint64_t policy_evict_normal() {
  std::uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Copies 16 bytes, or with valid == false writes 16 zero bytes and reads nothing (`source` must
// still be an address within an allocation). L2 fetches the kFetched bytes around the source.
template <int kFetched = 256>
__device__ __forceinline__ void cp_async_zfill(std::uint32_t destination, const void* source,
                                               bool valid, std::uint64_t policy) {
  static_assert(kFetched == 256 || kFetched == 128);
  if constexpr (kFetched == 256) {
    asm volatile(
        "cp.async.cg.shared::cta.global.L2::cache_hint.L2::256B [%0], [%1], 16, %2, %3;" ::"r"(
            destination),
        "l"(source), "r"(valid ? 16 : 0), "l"(policy)
        : "memory");
  } else {
    asm volatile(
        "cp.async.cg.shared::cta.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(
            destination),
        "l"(source), "r"(valid ? 16 : 0), "l"(policy)
        : "memory");
  }
}

// The same of 4 bytes at a multiple of 4, which go through L1.
__device__ __forceinline__ void cp_async_word_zfill(std::uint32_t destination, const void* source,
                                                    bool valid) {
  asm volatile("cp.async.ca.shared::cta.global [%0], [%1], 4, %2;" ::"r"(destination), "l"(source),
               "r"(valid ? 4 : 0)
               : "memory");
}

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
