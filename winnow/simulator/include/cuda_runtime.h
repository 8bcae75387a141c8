// Stands for CUDA's header in builds for the simulator: the language's qualifiers, vector types and
// built-in functions, as far as Winnow's kernels use them, and the runtime calls of their launches.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "winnow/simulator/engine.h"
#include "winnow/simulator/launch.h"

// ---- Qualifiers --------------------------------------------------------------------------------

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)

// ---- Types -------------------------------------------------------------------------------------

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned x_size = 1, unsigned y_size = 1, unsigned z_size = 1)
      : x(x_size), y(y_size), z(z_size) {}
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) longlong2 {
  long long x, y;
};
struct alignas(16) ulonglong2 {
  unsigned long long x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }

// Of the thread that runs: the engine sets them.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

// ---- Functions of threads alone ----------------------------------------------------------------

inline std::uint32_t __float_as_uint(float x) { return std::bit_cast<std::uint32_t>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __uint_as_float(std::uint32_t x) { return std::bit_cast<float>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }
inline int __ffsll(long long x) {
  return x == 0 ? 0 : std::countr_zero(static_cast<unsigned long long>(x)) + 1;
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>((std::uint64_t{a} * b) >> 32);
}
// The larger of each pair of 16-bit halves.
inline unsigned __vmaxu2(unsigned a, unsigned b) {
  const unsigned low = (a & 0xffffu) > (b & 0xffffu) ? a & 0xffffu : b & 0xffffu;
  const unsigned high = a >> 16 > b >> 16 ? a >> 16 : b >> 16;
  return high << 16 | low;
}
// To the nearest integer, even where two are as near; at the ends of the range beyond it, 0 of NaN.
inline int __float2int_rn(float x) {
  if (x != x) return 0;
  if (x >= 0x1p31f) return INT32_MAX;
  if (x < -0x1p31f) return INT32_MIN;
  return static_cast<int>(std::nearbyint(x));
}
inline long long __float2ll_rn(float x) {
  if (x != x) return INT64_MIN;
  if (x >= 0x1p63f) return INT64_MAX;
  if (x < -0x1p63f) return INT64_MIN;
  return static_cast<long long>(std::nearbyint(x));
}
inline float __ll2float_rn(long long x) { return static_cast<float>(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}
inline long long clock64() { return static_cast<long long>(winnow::simulator::clock_ticks()); }
[[noreturn]] inline void __trap(
    winnow::simulator::Where where = winnow::simulator::Where::current()) {
  winnow::simulator::fail("trap", "the kernel calls __trap()", where);
}
inline void __threadfence(winnow::simulator::Where where = winnow::simulator::Where::current()) {
  winnow::simulator::fence(winnow::simulator::Scope::gpu, where);
}
inline void __threadfence_system(
    winnow::simulator::Where where = winnow::simulator::Where::current()) {
  winnow::simulator::fence(winnow::simulator::Scope::system, where);
}
inline void __threadfence_block(
    winnow::simulator::Where where = winnow::simulator::Where::current()) {
  winnow::simulator::fence(winnow::simulator::Scope::block, where);
}

// ---- Memory ------------------------------------------------------------------------------------

template <class T>
T __ldg(const T* address, winnow::simulator::Where where = winnow::simulator::Where::current()) {
  address = winnow::simulator::altered(address, where);
  winnow::simulator::check_global_read(address, sizeof(T), alignof(T), where);
  return *address;
}
template <class T>
T __ldcg(const T* address, winnow::simulator::Where where = winnow::simulator::Where::current()) {
  return __ldg(address, where);
}
template <class T>
T __ldcs(const T* address, winnow::simulator::Where where = winnow::simulator::Where::current()) {
  return __ldg(address, where);
}

namespace winnow::simulator {
template <class T, class Function>
T read_and_update(T* address, const Function& function, const Where& where,
                  Scope scope = Scope::gpu) {
  T before{};
  atomic_begin(address, &before, sizeof(T), Order::relaxed, scope, where);
  if (is_dropped(where)) return before;
  T after = function(before);
  if constexpr (std::is_integral_v<T>) after = altered(after, where);
  atomic_end(address, &after, sizeof(T));
  return before;
}
}  // namespace winnow::simulator

template <class T>
T atomicAdd(T* address, std::type_identity_t<T> value,
            winnow::simulator::Where where = winnow::simulator::Where::current()) {
  value = winnow::simulator::altered(value, where);
  return winnow::simulator::read_and_update(
      address, [=](T before) { return static_cast<T>(before + value); }, where);
}
template <class T>
T atomicSub(T* address, std::type_identity_t<T> value,
            winnow::simulator::Where where = winnow::simulator::Where::current()) {
  return winnow::simulator::read_and_update(
      address, [=](T before) { return static_cast<T>(before - value); }, where);
}
inline unsigned atomicInc(unsigned* address, unsigned last,
                          winnow::simulator::Where where = winnow::simulator::Where::current()) {
  return winnow::simulator::read_and_update(
      address, [=](unsigned before) { return before >= last ? 0 : before + 1; }, where);
}
template <class T>
T atomicMax(T* address, std::type_identity_t<T> value,
            winnow::simulator::Where where = winnow::simulator::Where::current()) {
  return winnow::simulator::read_and_update(
      address, [=](T before) { return before < value ? value : before; }, where);
}
template <class T>
T atomicMin(T* address, std::type_identity_t<T> value,
            winnow::simulator::Where where = winnow::simulator::Where::current()) {
  return winnow::simulator::read_and_update(
      address, [=](T before) { return value < before ? value : before; }, where);
}
template <class T>
T atomicMin_system(T* address, std::type_identity_t<T> value,
                   winnow::simulator::Where where = winnow::simulator::Where::current()) {
  return winnow::simulator::read_and_update(
      address, [=](T before) { return value < before ? value : before; }, where,
      winnow::simulator::Scope::system);
}
template <class T>
T atomicExch(T* address, std::type_identity_t<T> value,
             winnow::simulator::Where where = winnow::simulator::Where::current()) {
  return winnow::simulator::read_and_update(address, [=](T) { return value; }, where);
}
template <class T>
T atomicCAS(T* address, std::type_identity_t<T> expected, std::type_identity_t<T> value,
            winnow::simulator::Where where = winnow::simulator::Where::current()) {
  return winnow::simulator::read_and_update(
      address, [=](T before) { return before == expected ? value : before; }, where);
}
template <class T>
T atomicOr(T* address, std::type_identity_t<T> value,
           winnow::simulator::Where where = winnow::simulator::Where::current()) {
  return winnow::simulator::read_and_update(
      address, [=](T before) { return before | value; }, where);
}

// ---- Threads together --------------------------------------------------------------------------

inline void __syncthreads(winnow::simulator::Where where = winnow::simulator::Where::current()) {
  winnow::simulator::named_barrier("sync", 0, winnow::simulator::block_threads(), true, where);
}
inline int __syncthreads_and(int predicate,
                             winnow::simulator::Where where = winnow::simulator::Where::current()) {
  return winnow::simulator::named_barrier("red.and", 0, winnow::simulator::block_threads(),
                                          predicate != 0, where);
}
inline int __syncthreads_or(int predicate,
                            winnow::simulator::Where where = winnow::simulator::Where::current()) {
  return !winnow::simulator::named_barrier("red.or", 0, winnow::simulator::block_threads(),
                                           predicate == 0, where);
}
inline void __syncwarp(unsigned mask = 0xffffffffu,
                       winnow::simulator::Where where = winnow::simulator::Where::current()) {
  if (winnow::simulator::is_dropped(where)) return;
  winnow::simulator::warp_meeting("__syncwarp", mask, 0, true, where);
}

namespace winnow::simulator {

template <class T>
std::uint64_t as_word(T value) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  std::uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(T));
  return word;
}
template <class T>
T from_word(std::uint64_t word) {
  T value;
  std::memcpy(&value, &word, sizeof(T));
  return value;
}
// What lane `source` gives; its own value where `source` is outside of the segment.
template <class T>
T shuffle(const char* kind, unsigned mask, T value, unsigned source, bool inside,
          const Where& where) {
  const auto words = warp_meeting(kind, mask, as_word(value), false, where);
  if (!inside || is_dropped(where)) return value;
  source = altered(source, where) % 32;
  if ((mask >> source & 1) == 0) {
    fail("warp",
         std::string(kind) + " from lane " + std::to_string(source) + ", which is not in the mask",
         where);
  }
  return from_word<T>(words[source]);
}

}  // namespace winnow::simulator

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32,
              winnow::simulator::Where where = winnow::simulator::Where::current()) {
  const unsigned segment = winnow::simulator::lane() & ~static_cast<unsigned>(width - 1);
  return winnow::simulator::shuffle("__shfl_sync", mask, value,
                                    segment + (static_cast<unsigned>(source) & (width - 1)), true,
                                    where);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int distance, int width = 32,
                  winnow::simulator::Where where = winnow::simulator::Where::current()) {
  const unsigned lane = winnow::simulator::lane(), source = lane ^ static_cast<unsigned>(distance);
  const auto segment = ~static_cast<unsigned>(width - 1);
  return winnow::simulator::shuffle("__shfl_xor_sync", mask, value, source & 31,
                                    (source & segment) <= (lane & segment), where);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32,
                 winnow::simulator::Where where = winnow::simulator::Where::current()) {
  const unsigned lane = winnow::simulator::lane();
  return winnow::simulator::shuffle("__shfl_up_sync", mask, value, (lane - distance) & 31,
                                    (lane & (width - 1)) >= distance, where);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32,
                   winnow::simulator::Where where = winnow::simulator::Where::current()) {
  const unsigned lane = winnow::simulator::lane();
  return winnow::simulator::shuffle("__shfl_down_sync", mask, value, (lane + distance) & 31,
                                    (lane & (width - 1)) + distance < static_cast<unsigned>(width),
                                    where);
}

namespace winnow::simulator {
// Combines the values of the lanes of a mask, the lowest first.
template <class T, class Function>
T combine(const char* kind, unsigned mask, T value, const Function& function, const Where& where) {
  const auto words = warp_meeting(kind, mask, as_word(value), false, where);
  if (is_dropped(where)) return value;
  bool first = true;
  T all{};
  for (unsigned i = 0; i < 32; ++i) {
    if ((mask >> i & 1) == 0) continue;
    const T one = from_word<T>(words[i]);
    all = first ? one : function(all, one);
    first = false;
  }
  return all;
}
}  // namespace winnow::simulator

inline unsigned __ballot_sync(
    unsigned mask, bool predicate,
    winnow::simulator::Where where = winnow::simulator::Where::current()) {
  return winnow::simulator::combine(
      "__ballot_sync", mask, predicate ? 1u << winnow::simulator::lane() : 0u,
      [](unsigned a, unsigned b) { return a | b; }, where);
}
inline int __any_sync(unsigned mask, bool predicate,
                      winnow::simulator::Where where = winnow::simulator::Where::current()) {
  return winnow::simulator::combine(
      "__any_sync", mask, predicate, [](bool a, bool b) { return a || b; }, where);
}
inline int __all_sync(unsigned mask, bool predicate,
                      winnow::simulator::Where where = winnow::simulator::Where::current()) {
  return winnow::simulator::combine(
      "__all_sync", mask, predicate, [](bool a, bool b) { return a && b; }, where);
}
template <class T>
unsigned __match_any_sync(unsigned mask, T value,
                          winnow::simulator::Where where = winnow::simulator::Where::current()) {
  const auto words = winnow::simulator::warp_meeting(
      "__match_any_sync", mask, winnow::simulator::as_word(value), false, where);
  if (winnow::simulator::is_dropped(where)) return 1u << winnow::simulator::lane();
  unsigned same = 0;
  for (unsigned i = 0; i < 32; ++i) {
    if ((mask >> i & 1) != 0 && words[i] == winnow::simulator::as_word(value)) same |= 1u << i;
  }
  return same;
}
template <class T>
T __reduce_add_sync(unsigned mask, T value,
                    winnow::simulator::Where where = winnow::simulator::Where::current()) {
  return winnow::simulator::combine(
      "__reduce_add_sync", mask, value, [](T a, T b) { return static_cast<T>(a + b); }, where);
}
template <class T>
T __reduce_max_sync(unsigned mask, T value,
                    winnow::simulator::Where where = winnow::simulator::Where::current()) {
  return winnow::simulator::combine(
      "__reduce_max_sync", mask, value, [](T a, T b) { return a < b ? b : a; }, where);
}
template <class T>
T __reduce_min_sync(unsigned mask, T value,
                    winnow::simulator::Where where = winnow::simulator::Where::current()) {
  return winnow::simulator::combine(
      "__reduce_min_sync", mask, value, [](T a, T b) { return b < a ? b : a; }, where);
}
template <class T>
T __reduce_or_sync(unsigned mask, T value,
                   winnow::simulator::Where where = winnow::simulator::Where::current()) {
  return winnow::simulator::combine(
      "__reduce_or_sync", mask, value, [](T a, T b) { return a | b; }, where);
}

#include "winnow/simulator/include/cuda_launches.h"
