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
__device__ __forceinline__ void meet_blocks(std::uint32_t* arrived, std::uint32_t* left) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(arrived, 1u);
    while (*const_cast<volatile std::uint32_t*>(arrived) < gridDim.x) continue;
    __threadfence();
    if (atomicAdd(left, 1u) == gridDim.x - 1) *left = *arrived = 0;  // nobody looks any more
  }
  __syncthreads();
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
