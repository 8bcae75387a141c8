// Host half of winnow/device/sm90/places.cuh.
#pragma once

#include <cstdint>

#include "winnow/device/common/places.cuh"
#include "winnow/device/sm90/barrier.cuh"
#include "winnow/device/sm90/cluster.cuh"

namespace winnow::device {

struct Barrier {
  std::uint64_t word;
};
template <>
inline constexpr bool kIsBarrier<Barrier> = true;

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

}  // namespace winnow::device
