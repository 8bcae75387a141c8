// Asynchronous copies from global to shared memory (cp.async), also with zero fill, and their L2
// policies. Device code only.
#pragma once

#include <cstdint>

namespace winnow::device {

// L2 eviction policies, passed to copies.
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

// The same without a policy, which costs registers; L2 fetches 128 bytes.
__device__ __forceinline__ void cp_async_zfill(std::uint32_t destination, const void* source,
                                               bool valid) {
  asm volatile("cp.async.cg.shared::cta.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination),
               "l"(source), "r"(valid ? 16 : 0)
               : "memory");
}

// The same for 4 bytes at a multiple of 4, which go through L1.
__device__ __forceinline__ void cp_async_word_zfill(std::uint32_t destination, const void* source,
                                                    bool valid) {
  asm volatile("cp.async.ca.shared::cta.global [%0], [%1], 4, %2;" ::"r"(destination), "l"(source),
               "r"(valid ? 4 : 0)
               : "memory");
}

// Begins to copy 16 bytes, from and to multiples of 16, past L1.
__device__ __forceinline__ void cp_async(std::uint32_t destination, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(destination), "l"(source)
               : "memory");
}

// Makes a group of the copies that the thread began since its last group.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until all groups of this thread but the last kPending have arrived. The thread alone sees
// them then; for other threads a barrier must follow.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace winnow::device
