// How warps share work without equal parts. Device code only.
#pragma once

#include <cstdint>

#include "winnow/device/common/warp.cuh"

namespace winnow::expert_parallel {

// The numbers of a counter (CudaState::claims) in turn, by whole warps; each warp claims its next
// one ahead, from begin() on.
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
  // Not an addition, for which the compiler gathers the warp's lanes and waits at once.
  __device__ void claim() {
    if (threadIdx.x % 32 == 0) ahead_ = atomicInc(counter_, 0xfffffffeu);
  }
  std::uint32_t* counter_;
  std::uint32_t from_, ahead_ = 0;
};

}  // namespace winnow::expert_parallel
