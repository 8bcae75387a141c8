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

// Loads of 16 bytes at a multiple of 16, which keep their order among themselves: of what this SM
// reads once, past its L1 cache, and of what it reads again.
__device__ __forceinline__ uint4 load_once(const void* address) {
  uint4 word;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "l"(address));
  return word;
}
__device__ __forceinline__ uint4 load_again(const void* address) {
  uint4 word;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "l"(address));
  return word;
}

// The word at `address` if `condition`, else `otherwise`. No branch stands around the load and
// nothing is chosen behind it, so that several of them are under way together.
__device__ __forceinline__ std::int32_t load_if(bool condition, const std::int32_t* address,
                                                std::int32_t otherwise) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n"
      "@p ld.global.nc.s32 %0, [%1];\n}"
      : "+r"(otherwise)
      : "l"(address), "r"(static_cast<std::uint32_t>(condition)));
  return otherwise;
}

// Loads that stay where they stand: before and after the same barriers and other such loads.
__device__ __forceinline__ std::int32_t load_now(const std::int32_t* address) {
  std::int32_t value;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(value) : "l"(address));
  return value;
}
__device__ __forceinline__ float load_now(const float* address) {
  float value;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(value) : "l"(address));
  return value;
}
__device__ __forceinline__ float2 load_now(const float2* address) {
  float2 value;
  asm volatile("ld.global.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "l"(address));
  return value;
}

__device__ __forceinline__ float4 load_now(const float4* address) {
  float4 value;
  asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "l"(address)
               : "memory");
  return value;
}

// A word that blocks of a launch hand data over with: what was written before a release, or seen
// after a barrier or __syncwarp(), is visible after an acquire that sees the word.
__device__ __forceinline__ std::uint32_t ld_acquire_gpu(const std::uint32_t* word) {
  std::uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ void st_release_gpu(std::uint32_t* word, std::uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// Loads of one word in the order that other threads of this GPU store it, without ordering anything
// else.
__device__ __forceinline__ std::uint32_t ld_relaxed_gpu(const std::uint32_t* address) {
  std::uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// Words that other GPUs and the CPU write or read too. With acquire: what the writer released
// before is visible from then on. With release: everything that this thread wrote before, and what
// it has seen of others (after a barrier or a fence), is visible to a thread that reads the word
// with acquire. Relaxed says nothing of other accesses: __threadfence_system() comes before.
__device__ __forceinline__ std::uint64_t ld_acquire_sys(const std::uint64_t* word) {
  std::uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ void st_release_sys(std::uint64_t* word, std::uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
__device__ __forceinline__ void st_relaxed_sys(std::uint64_t* word, std::uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// Adds to memory without waiting, each element atomically, in no particular order. `address` is
// aligned to the value's size; `policy` is an L2 eviction policy (device/common/copy.cuh).
template <std::uint32_t kValue>
__device__ __forceinline__ void reduce_add(std::uint32_t* address) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(address), "n"(kValue) : "memory");
}
__device__ __forceinline__ void reduce_add(float* address, float value) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(address), "f"(value) : "memory");
}
// sm_90 and newer, as all with four f32.
__device__ __forceinline__ void reduce_add(float* address, float4 value) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address),
               "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
               : "memory");
}
__device__ __forceinline__ void reduce_add(float* address, float4 value, std::uint64_t policy) {
  asm volatile(
      "red.relaxed.gpu.global.add.L2::cache_hint.v4.f32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(address),
      "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void reduce_add(unsigned long long* address, unsigned long long value) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}
__device__ __forceinline__ void reduce_add(unsigned long long* address, unsigned long long value,
                                           std::uint64_t policy) {
  asm volatile("red.relaxed.gpu.global.add.L2::cache_hint.u64 [%0], %1, %2;" ::"l"(address),
               "l"(value), "l"(policy)
               : "memory");
}

}  // namespace winnow::device
