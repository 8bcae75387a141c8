// How kernels look at the pairs of tokens, how the blocks of one meet, how they are loaded.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

#include "winnow/device/common/warp.cuh"
#include "winnow/expert_parallel/device/view.h"
#include "winnow/expert_parallel/dispatch/kernels_cuda.h"

namespace winnow::expert_parallel {

// A warp takes 32 / K tokens at a time, and each lane one of their pairs.
struct PairLane {
  int tokens, slot, k;
  bool used;  // the last 32 % K lanes are not
  __device__ PairLane(int topk, int lane)
      : tokens(32 / topk), slot(lane / topk), k(lane % topk), used(slot < tokens) {}
};

__device__ __forceinline__ unsigned lanes_below(int lane) { return (1u << lane) - 1; }

// All blocks of a kernel, which run side by side: what any wrote before can be read after.
// `all_say(mine)` is the barrier of those threads of a block that meet, the first one among them:
// whether all of them say so. False: the layer is broken, and some blocks may not come.
template <class Barrier>
__device__ __forceinline__ bool meet_blocks(const LayerView& view, const Barrier& all_say) {
  std::uint32_t* arrived = &view.state->tickets[kBlocksArrived];
  std::uint32_t* left = &view.state->tickets[kBlocksLeft];
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

__host__ __device__ inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
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
