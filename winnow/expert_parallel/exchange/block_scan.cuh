// An inclusive prefix sum by all threads of a block. Device code only.
#pragma once

#include <cstdint>

namespace winnow::expert_parallel {

// Calls store(i, load(0) + ... + load(i)) for every i < size. store(i) may overwrite what load(i)
// reads. `scratch`: an element for each warp of the block, in shared memory.
template <class Load, class Store>
__device__ void inclusive_sums(std::int64_t size, std::int64_t* scratch, const Load& load,
                               const Store& store) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  std::int64_t before = 0;  // the sum of earlier rounds
  for (std::int64_t base = 0; base < size; base += blockDim.x) {
    const std::int64_t i = base + threadIdx.x;
    std::int64_t sum = i < size ? load(i) : 0;
    for (int distance = 1; distance < 32; distance *= 2) {
      const std::int64_t below = __shfl_up_sync(0xffffffffu, sum, distance);
      if (lane >= distance) sum += below;
    }
    if (lane == 31) scratch[warp] = sum;
    __syncthreads();
    std::int64_t of_round = 0;
    for (int w = 0; w < int(blockDim.x) / 32; ++w) {
      if (w < warp) sum += scratch[w];
      of_round += scratch[w];
    }
    if (i < size) store(i, before + sum);
    before += of_round;
    __syncthreads();
  }
}

}  // namespace winnow::expert_parallel
