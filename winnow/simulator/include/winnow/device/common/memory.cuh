// Host half of winnow/device/common/memory.cuh.
#pragma once

#include <cstdint>
#include <cstring>

#include <cuda_runtime.h>

#include "winnow/simulator/engine.h"

namespace winnow::device {

using simulator::Where;

inline void store_streaming(void* address, std::uint32_t a, std::uint32_t b, std::uint32_t c,
                            std::uint32_t d, Where where = Where::current()) {
  if (simulator::is_dropped(where)) return;
  simulator::check_global_write(address, 16, 16, where);
  const std::uint32_t words[4] = {a, b, c, d};
  std::memcpy(address, words, 16);
}

inline uint4 load_once(const void* address, Where where = Where::current()) {
  return __ldg(static_cast<const uint4*>(address), where);
}
inline uint4 load_again(const void* address, Where where = Where::current()) {
  return load_once(address, where);
}

inline std::int32_t load_if(bool condition, const std::int32_t* address, std::int32_t otherwise,
                            Where where = Where::current()) {
  return condition ? __ldg(address, where) : otherwise;
}

inline std::int32_t load_now(const std::int32_t* address, Where where = Where::current()) {
  return __ldg(address, where);
}
inline float load_now(const float* address, Where where = Where::current()) {
  return __ldg(address, where);
}
inline float2 load_now(const float2* address, Where where = Where::current()) {
  return __ldg(address, where);
}
inline float4 load_now(const float4* address, Where where = Where::current()) {
  return __ldg(address, where);
}

// Others run before the load, where a kernel looks at a word again and again.
inline std::uint32_t ld_acquire_gpu(const std::uint32_t* word, Where where = Where::current()) {
  simulator::poll();
  return simulator::load_strong(word, simulator::Order::acquire, simulator::Scope::gpu, where);
}
inline void st_release_gpu(std::uint32_t* word, std::uint32_t value,
                           Where where = Where::current()) {
  simulator::store_strong(word, value, simulator::Order::release, simulator::Scope::gpu, where);
}

inline std::uint32_t ld_relaxed_gpu(const std::uint32_t* address, Where where = Where::current()) {
  simulator::poll();
  return simulator::load_strong(address, simulator::Order::relaxed, simulator::Scope::gpu, where);
}
inline std::uint64_t ld_acquire_sys(const std::uint64_t* word, Where where = Where::current()) {
  simulator::poll();
  return simulator::load_strong(word, simulator::Order::acquire, simulator::Scope::system, where);
}
inline void st_release_sys(std::uint64_t* word, std::uint64_t value,
                           Where where = Where::current()) {
  simulator::store_strong(word, value, simulator::Order::release, simulator::Scope::system, where);
}
inline void st_relaxed_sys(std::uint64_t* word, std::uint64_t value,
                           Where where = Where::current()) {
  simulator::store_strong(word, value, simulator::Order::relaxed, simulator::Scope::system, where);
}

// Each of `count` elements atomically.
template <class T>
void add_to_each(T* address, const T* values, int count, Where where) {
  if (simulator::is_dropped(where)) return;
  constexpr int kMost = 4;
  T sums[kMost];
  const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(T);
  simulator::atomic_begin(address, sums, bytes, simulator::Order::relaxed, simulator::Scope::gpu,
                          where);
  for (int i = 0; i < count; ++i) sums[i] += values[i];
  simulator::atomic_end(address, sums, bytes);
}
template <std::uint32_t kValue>
void reduce_add(std::uint32_t* address, Where where = Where::current()) {
  const std::uint32_t value = kValue;
  add_to_each(address, &value, 1, where);
}
inline void reduce_add(float* address, float value, Where where = Where::current()) {
  add_to_each(address, &value, 1, where);
}
inline void reduce_add(float* address, float4 value, Where where = Where::current()) {
  const float values[4] = {value.x, value.y, value.z, value.w};
  add_to_each(address, values, 4, where);
}
inline void reduce_add(float* address, float4 value, std::uint64_t,
                       Where where = Where::current()) {
  reduce_add(address, value, where);
}
inline void reduce_add(unsigned long long* address, unsigned long long value,
                       Where where = Where::current()) {
  add_to_each(address, &value, 1, where);
}
inline void reduce_add(unsigned long long* address, unsigned long long value, std::uint64_t,
                       Where where = Where::current()) {
  reduce_add(address, value, where);
}

}  // namespace winnow::device
