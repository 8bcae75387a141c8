// How warps share work that is not divided in advance. Device code only.
#pragma once

#include <cstdint>

#include "winnow/device/common/warp.cuh"

namespace winnow::expert_parallel {

// Gives whole warps the numbers of a counter (CudaState::claims), each to one warp. A warp claims
// its next number ahead, the first one in begin().
class Claims {
 public:
  // The numbers below `from` are given out already.
  __device__ explicit Claims(std::uint32_t* counter, std::uint32_t from = 0)
      : counter_(counter), from_(from) {}
  __device__ void begin() { claim(); }
  __device__ std::uint32_t next() {
    const std::uint32_t number = __shfl_sync(device::kFullWarp, ahead_, 0);
    claim();
    return from_ + number;
  }

 private:
  // Not atomicAdd(), for which the compiler combines the warp's lanes and waits at once.
  __device__ void claim() {
    if (threadIdx.x % 32 == 0) ahead_ = atomicInc(counter_, 0xfffffffeu);
  }
  std::uint32_t* counter_;
  std::uint32_t from_, ahead_ = 0;
};

}  // namespace winnow::expert_parallel
