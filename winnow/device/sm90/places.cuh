// mbarriers as typed places. Device code only.
#pragma once

#include <cstdint>

#include "winnow/device/common/places.cuh"
#include "winnow/device/sm90/barrier.cuh"
#include "winnow/device/sm90/cluster.cuh"

namespace winnow::device {

// An mbarrier, as a member of the struct.
struct Barrier {
  std::uint64_t word;
};

// The functions of barrier.cuh under shorter names.
template <>
struct Place<Barrier> {
  std::uint32_t address;

  __device__ __forceinline__ void init(std::uint32_t arrivals) const {
    mbarrier_init(address, arrivals);
  }
  __device__ __forceinline__ void arrive() const { mbarrier_arrive(address); }
  __device__ __forceinline__ void arrive_warp(int count = 1) const {
    mbarrier_arrive_warp(address, count);
  }
  __device__ __forceinline__ void arrive_cp_async() const { mbarrier_arrive_cp_async(address); }
  __device__ __forceinline__ void arrive_expect(std::uint32_t bytes) const {
    mbarrier_arrive_expect(address, bytes);
  }
  __device__ __forceinline__ bool test_wait(std::uint32_t parity) const {
    return mbarrier_test_wait(address, parity);
  }
  __device__ __forceinline__ bool try_wait(std::uint32_t parity) const {
    return mbarrier_try_wait(address, parity);
  }
  __device__ __forceinline__ void wait(std::uint32_t parity, const char* role, int what) const {
    mbarrier_wait(address, parity, role, what);
  }
  // Between the blocks of a cluster: the waiting block's own barrier, or that of block `rank`.
  __device__ __forceinline__ void wait_cluster(std::uint32_t parity, const char* role,
                                               int what) const {
    mbarrier_wait_cluster(address, parity, role, what);
  }
  __device__ __forceinline__ void arrive_cluster(std::uint32_t rank) const {
    mbarrier_arrive_cluster(map_shared(address, rank));
  }
  __device__ __forceinline__ void arrive_warp_cluster(std::uint32_t rank) const {
    mbarrier_arrive_warp_cluster(map_shared(address, rank));
  }
};

}  // namespace winnow::device
