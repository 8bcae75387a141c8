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
  simulator::check_global_read(address, 16, 16, where);
  uint4 word;
  std::memcpy(&word, address, 16);
  return word;
}
inline uint4 load_again(const void* address, Where where = Where::current()) {
  return load_once(address, where);
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
  simulator::check_global_read(address, 16, 16, where);
  return *address;
}

// Blocks run one after the other: what is waited for is there, or comes never.
inline std::uint32_t ld_acquire_gpu(const std::uint32_t* word, Where where = Where::current()) {
  const std::uint32_t value = __ldg(word, where);
  simulator::poll();
  return value;
}
inline void st_release_gpu(std::uint32_t* word, std::uint32_t value,
                           Where where = Where::current()) {
  if (simulator::is_dropped(where)) return;
  simulator::check_global_write(word, 4, 4, where);
  *word = value;
}

inline std::uint32_t ld_relaxed_gpu(const std::uint32_t* address, Where where = Where::current()) {
  return __ldg(address, where);
}
inline std::uint64_t ld_acquire_sys(const std::uint64_t* word, Where where = Where::current()) {
  return __ldg(word, where);
}
inline void st_release_sys(std::uint64_t* word, std::uint64_t value,
                           Where where = Where::current()) {
  if (simulator::is_dropped(where)) return;
  simulator::check_global_write(word, 8, 8, where);
  *word = value;
}
inline void st_relaxed_sys(std::uint64_t* word, std::uint64_t value,
                           Where where = Where::current()) {
  st_release_sys(word, value, where);
}

template <std::uint32_t kValue>
void reduce_add(std::uint32_t* address, Where where = Where::current()) {
  if (simulator::is_dropped(where)) return;
  simulator::check_global_write(address, 4, 4, where);
  *address += kValue;
}
inline void reduce_add(float* address, float value, Where where = Where::current()) {
  if (simulator::is_dropped(where)) return;
  simulator::check_global_write(address, sizeof(float), sizeof(float), where);
  *address += value;
}
inline void reduce_add(float* address, float4 value, Where where = Where::current()) {
  if (simulator::is_dropped(where)) return;
  simulator::check_global_write(address, 16, 16, where);
  address[0] += value.x;
  address[1] += value.y;
  address[2] += value.z;
  address[3] += value.w;
}
inline void reduce_add(float* address, float4 value, std::uint64_t,
                       Where where = Where::current()) {
  reduce_add(address, value, where);
}
inline void reduce_add(unsigned long long* address, unsigned long long value,
                       Where where = Where::current()) {
  if (simulator::is_dropped(where)) return;
  simulator::check_global_write(address, 8, 8, where);
  *address += value;
}
inline void reduce_add(unsigned long long* address, unsigned long long value, std::uint64_t,
                       Where where = Where::current()) {
  reduce_add(address, value, where);
}

}  // namespace winnow::device
