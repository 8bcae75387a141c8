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
// Copies 16 bytes, or with valid == false writes 16 zero bytes and reads nothing (`source` must
// still be an address within an allocation). L2 fetches the 256 bytes around the source.
__device__ __forceinline__ void cp_async_zfill(std::uint32_t destination, const void* source,
                                               bool valid, std::uint64_t policy) {
  asm volatile(
      "cp.async.cg.shared::cta.global.L2::cache_hint.L2::256B [%0], [%1], 16, %2, %3;" ::"r"(
          destination),
      "l"(source), "r"(valid ? 16 : 0), "l"(policy)
      : "memory");
}

// Asks L2 to fetch `bytes` (a multiple of 16) from `source` (aligned to 16). One thread.
__device__ __forceinline__ void bulk_prefetch_l2(const void* source, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes) : "memory");
}

}  // namespace winnow::device
