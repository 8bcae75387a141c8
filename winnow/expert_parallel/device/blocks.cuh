// How the blocks of a kernel meet, and how a kernel is loaded. Device code only.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

#include "winnow/expert_parallel/device/view.h"

namespace winnow::expert_parallel {

// All blocks of a kernel, which run side by side: what any wrote before can be read after.
// `all_say(mine)` is the barrier of those threads of a block that meet, the first one among them:
// whether all of them say so. False: the layer is broken, and some blocks may not come.
template <class Barrier>
__device__ __forceinline__ bool meet_blocks(const LayerView& view, const Barrier& all_say) {
  std::uint32_t* arrived = &view.state->arrivals[kBlocksArrived];
  std::uint32_t* left = &view.state->arrivals[kBlocksLeft];
  bool met = all_say(true);
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(arrived, 1u);
    while (met && *const_cast<volatile std::uint32_t*>(arrived) < gridDim.x) met = !broken(view);
    __threadfence();
    // Nobody looks any more when all have left.
    if (met && atomicAdd(left, 1u) == gridDim.x - 1) *left = *arrived = 0;
  }
  return all_say(met);
}

// Loads a kernel onto the current GPU and lets it have so much dynamic shared memory.
template <class Kernel>
cudaError_t load_kernel(Kernel* kernel, int shared_bytes) {
  cudaFuncAttributes attributes;
  const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
  if (status != cudaSuccess) return status;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
}

}  // namespace winnow::expert_parallel
