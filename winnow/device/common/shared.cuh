// Shared memory: its addresses in the shared window, and loads and stores by such an address, which
// the compiler keeps where they stand. Device code only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace winnow::device {

// The block's dynamic shared memory. Kernels of one source file ask for the same alignment.
template <int kAlignment>
__device__ __forceinline__ std::byte* dynamic_shared() {
  extern __shared__ __align__(kAlignment) std::byte dynamic_shared_memory[];
  return dynamic_shared_memory;
}

// The same as an array `name` that a source file declares once for its kernels.
#define WINNOW_DYNAMIC_SHARED(name, alignment) \
  extern __shared__ __align__(alignment) std::byte name[]

// Declares `name`, an object of the given type in the block's static shared memory, not
// initialised: WINNOW_BLOCK_SHARED(counts, int[8][32]);
#define WINNOW_BLOCK_SHARED(name, ...) __shared__ std::type_identity_t<__VA_ARGS__> name
#define WINNOW_BLOCK_SHARED_ALIGNED(alignment, name, ...) \
  __shared__ alignas(alignment) std::type_identity_t<__VA_ARGS__> name

// The 32-bit address in the shared window, by which PTX instructions name shared memory.
__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// ld.shared of a float, a word of 32 or 64 bits, aligned to its size.
template <class T>
__device__ __forceinline__ T ld_shared(std::uint32_t address) {
  T value;
  if constexpr (std::is_same_v<T, float>) {
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  } else if constexpr (sizeof(T) == 8) {
    asm volatile("ld.shared.b64 %0, [%1];" : "=l"(value) : "r"(address) : "memory");
  } else {
    static_assert(sizeof(T) == 4);
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  }
  return value;
}

// Four words, aligned to 16 bytes, that are not written any more: the load is ordered among other
// loads only.
__device__ __forceinline__ int4 ld_shared_v4(std::uint32_t address) {
  int4 value;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address));
  return value;
}

// Four words, aligned to 16 bytes.
__device__ __forceinline__ uint4 ld_shared_words(std::uint32_t address) {
  uint4 value;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

// 16 bytes at a multiple of 16 if `condition`; otherwise nothing is read, and the value is any.
__device__ __forceinline__ uint4 ld_shared_v4_if(bool condition, std::uint32_t address) {
  uint4 value;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %4, 0;\n"
      "@p ld.shared.v4.u32 {%0, %1, %2, %3}, [%5];\n}"
      : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
      : "r"(static_cast<std::uint32_t>(condition)), "r"(address)
      : "memory");
  return value;
}

// st.shared. `address` is aligned to the value's size.
__device__ __forceinline__ void st_shared(std::uint32_t address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}
__device__ __forceinline__ void st_shared(std::uint32_t address, std::int32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void st_shared(std::uint32_t address, std::uint64_t value) {
  asm volatile("st.shared.b64 [%0], %1;" ::"r"(address), "l"(value) : "memory");
}
__device__ __forceinline__ void st_shared(std::uint32_t address, std::uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void st_shared(std::uint32_t address, std::uint16_t value) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(value) : "memory");
}
__device__ __forceinline__ void st_shared(std::uint32_t address, std::uint8_t value) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(std::uint32_t{value}) : "memory");
}
__device__ __forceinline__ void st_shared(std::uint32_t address, uint4 value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

// Words that threads of a block hand data over with: what was written before a release is visible
// after an acquire that sees the word.
__device__ __forceinline__ std::uint32_t ld_acquire_cta_shared(const std::uint32_t* word) {
  std::uint32_t value;
  asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];"
               : "=r"(value)
               : "r"(shared_address(word))
               : "memory");
  return value;
}
__device__ __forceinline__ void st_release_cta_shared(std::uint32_t* word, std::uint32_t value) {
  asm volatile("st.release.cta.shared::cta.u32 [%0], %1;" ::"r"(shared_address(word)), "r"(value)
               : "memory");
}
template <std::uint32_t kValue>
__device__ __forceinline__ void red_release_cta_shared_add(std::uint32_t* word) {
  asm volatile("red.release.cta.shared::cta.add.u32 [%0], %1;" ::"r"(shared_address(word)),
               "n"(kValue)
               : "memory");
}

}  // namespace winnow::device
