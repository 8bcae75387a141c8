// Copies of boxes of a tensor from global to shared memory by the tensor memory accelerator. The
// tensor is described by a CUtensorMap (device/sm90/tensor_map.h), a __grid_constant__ parameter.
#pragma once

#include <cstdint>

#include <cuda.h>

namespace winnow::device {

// Asks for the description itself, which the first copy would wait for. One thread.
__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Copies the box that begins at column x of row y to `destination`, which reports its bytes to
// `barrier` (mbarrier_arrive_expect()). Elements outside of the tensor become 0. One thread.
__device__ __forceinline__ void tensor_load(std::uint32_t destination, const CUtensorMap* map,
                                            std::uint32_t barrier, int x, int y,
                                            std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "l"(policy)
      : "memory");
}

// The same of a tensor of three dimensions.
__device__ __forceinline__ void tensor_load(std::uint32_t destination, const CUtensorMap* map,
                                            std::uint32_t barrier, int x, int y, int z,
                                            std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "l"(policy)
      : "memory");
}

}  // namespace winnow::device
