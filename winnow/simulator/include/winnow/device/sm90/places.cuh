// Host half of winnow/device/sm90/places.cuh.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "winnow/device/common/shared.cuh"
#include "winnow/device/sm90/barrier.cuh"
#include "winnow/device/sm90/cluster.cuh"

namespace winnow::device {

struct Barrier {
  std::uint64_t word;
};

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

template <>
struct Place<Barrier> {
  std::uint32_t address;

  void init(std::uint32_t arrivals, Where where = Where::current()) const {
    mbarrier_init(address, arrivals, where);
  }
  void arrive(Where where = Where::current()) const { mbarrier_arrive(address, where); }
  void arrive_warp(int count = 1, Where where = Where::current()) const {
    mbarrier_arrive_warp(address, count, where);
  }
  void arrive_cp_async(Where where = Where::current()) const {
    mbarrier_arrive_cp_async(address, where);
  }
  void arrive_expect(std::uint32_t bytes, Where where = Where::current()) const {
    mbarrier_arrive_expect(address, bytes, where);
  }
  bool test_wait(std::uint32_t parity, Where where = Where::current()) const {
    return mbarrier_test_wait(address, parity, where);
  }
  bool try_wait(std::uint32_t parity, Where where = Where::current()) const {
    return mbarrier_try_wait(address, parity, where);
  }
  void wait(std::uint32_t parity, const char* role, int what,
            Where where = Where::current()) const {
    mbarrier_wait(address, parity, role, what, where);
  }
  void wait_cluster(std::uint32_t parity, const char* role, int what,
                    Where where = Where::current()) const {
    mbarrier_wait_cluster(address, parity, role, what, where);
  }
  void arrive_cluster(std::uint32_t rank, Where where = Where::current()) const {
    mbarrier_arrive_cluster(map_shared(address, rank), where);
  }
  void arrive_warp_cluster(std::uint32_t rank, Where where = Where::current()) const {
    mbarrier_arrive_warp_cluster(map_shared(address, rank), where);
  }
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
template <class T>
Place<T> named(std::uint32_t address, [[maybe_unused]] const char* name) {
  if constexpr (std::is_same_v<std::remove_all_extents_t<T>, Barrier>) {
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
