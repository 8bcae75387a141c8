// Host half of winnow/device/common/places.cuh.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "winnow/device/common/shared.cuh"

namespace winnow::device {

template <class T>
struct Place {
  std::uint32_t address;

  Place operator+(int n) const { return {address + n * static_cast<std::uint32_t>(sizeof(T))}; }

  T load(Where where = Where::current()) const { return ld_shared<T>(address, where); }
  void store(T value, Where where = Where::current()) const { st_shared(address, value, where); }
};

template <class T, std::size_t kCount>
struct Place<T[kCount]> {
  std::uint32_t address;

  Place<T> operator[](int i) const { return {address + i * static_cast<std::uint32_t>(sizeof(T))}; }
};

template <class T>
Place<T> place_of(const T& object) {
  return {shared_address(&object)};
}

template <class Memory_>
struct Shared {
  using Memory = Memory_;
  std::uint32_t base;

  template <class T>
  std::uint32_t offset(Place<T> place) const {
    return place.address - base;
  }
};
// Of a type whose objects reports name: Barrier, in the half for sm90.
template <class T>
inline constexpr bool kIsBarrier = false;
template <class T>
Place<T> named(std::uint32_t address, [[maybe_unused]] const char* name) {
  if constexpr (kIsBarrier<std::remove_all_extents_t<T>>) {
    static_assert(std::rank_v<T> <= 2);
    simulator::name_barriers(address, name, std::extent_v<T, 0>, std::extent_v<T, 1>);
  }
  return {address};
}
#define WINNOW_PLACE(member)                                                         \
  auto member() const {                                                              \
    return ::winnow::device::named<decltype(Memory::member)>(                        \
        this->base + static_cast<std::uint32_t>(offsetof(Memory, member)), #member); \
  }

}  // namespace winnow::device
