// Host half of winnow/device/common/shared.cuh.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <cuda_runtime.h>

#include "winnow/simulator/engine.h"

namespace winnow::device {

using simulator::Where;

template <int kAlignment>
std::byte* dynamic_shared() {
  return simulator::dynamic_shared(kAlignment);
}

// A name for the memory of the block that runs.
template <int kAlignment>
struct DynamicShared {
  operator std::byte*() const { return dynamic_shared<kAlignment>(); }
};
#define WINNOW_DYNAMIC_SHARED(name, alignment) \
  constexpr ::winnow::device::DynamicShared<alignment> name

// The reference is made anew in every call, its key once for every instance of the function.
#define WINNOW_BLOCK_SHARED_ALIGNED(alignment, name, ...)                                        \
  static constexpr char name##_key = 0;                                                          \
  auto& name = *static_cast<std::type_identity_t<__VA_ARGS__>*>(winnow::simulator::block_shared( \
      &name##_key, sizeof(std::type_identity_t<__VA_ARGS__>), alignment))
#define WINNOW_BLOCK_SHARED(name, ...) \
  WINNOW_BLOCK_SHARED_ALIGNED(alignof(std::type_identity_t<__VA_ARGS__>), name, __VA_ARGS__)

inline std::uint32_t shared_address(const void* pointer, Where where = Where::current()) {
  return simulator::window_address(pointer, where);
}

template <class T>
T ld_shared(std::uint32_t address, Where where = Where::current()) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  return simulator::load_shared<T>(simulator::altered(address, where), where);
}
inline int4 ld_shared_v4(std::uint32_t address, Where where = Where::current()) {
  return simulator::load_shared<int4>(address, where);
}
inline uint4 ld_shared_words(std::uint32_t address, Where where = Where::current()) {
  return simulator::load_shared<uint4>(address, where);
}
inline uint4 ld_shared_v4_if(bool condition, std::uint32_t address,
                             Where where = Where::current()) {
  const unsigned any = 0xdeadbeefu;
  return condition ? simulator::load_shared<uint4>(address, where) : uint4{any, any, any, any};
}

inline void st_shared(std::uint32_t address, float value, Where where = Where::current()) {
  simulator::write_shared(address, &value, sizeof(value), where);
}
inline void st_shared(std::uint32_t address, std::int32_t value, Where where = Where::current()) {
  simulator::write_shared(address, &value, sizeof(value), where);
}
inline void st_shared(std::uint32_t address, std::uint64_t value, Where where = Where::current()) {
  simulator::write_shared(address, &value, sizeof(value), where);
}
inline void st_shared(std::uint32_t address, std::uint32_t value, Where where = Where::current()) {
  simulator::write_shared(address, &value, sizeof(value), where);
}
inline void st_shared(std::uint32_t address, std::uint16_t value, Where where = Where::current()) {
  simulator::write_shared(address, &value, sizeof(value), where);
}
inline void st_shared(std::uint32_t address, std::uint8_t value, Where where = Where::current()) {
  simulator::write_shared(address, &value, sizeof(value), where);
}
inline void st_shared(std::uint32_t address, uint4 value, Where where = Where::current()) {
  simulator::write_shared(address, &value, sizeof(value), where);
}

inline std::uint32_t ld_acquire_cta_shared(const std::uint32_t* word,
                                           Where where = Where::current()) {
  simulator::poll();
  return simulator::load_strong(word, simulator::Order::acquire, simulator::Scope::block, where);
}
inline void st_release_cta_shared(std::uint32_t* word, std::uint32_t value,
                                  Where where = Where::current()) {
  simulator::store_strong(word, value, simulator::Order::release, simulator::Scope::block, where);
}
template <std::uint32_t kValue>
void red_release_cta_shared_add(std::uint32_t* word, Where where = Where::current()) {
  if (simulator::is_dropped(where)) return;
  std::uint32_t value = 0;
  simulator::atomic_begin(word, &value, 4, simulator::Order::release, simulator::Scope::block,
                          where);
  value += kValue;
  simulator::atomic_end(word, &value, 4);
}

}  // namespace winnow::device
