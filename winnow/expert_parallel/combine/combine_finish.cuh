// How a rank is done with the memory of its node's other ranks. Device code only.
#pragma once

#include "winnow/device/common/warp.cuh"
#include "winnow/expert_parallel/combine/combine_kernels_cuda.h"
#include "winnow/expert_parallel/cuda/signal_node.cuh"

namespace winnow::expert_parallel {

// The last block to come here tells the ranks of the node that this one is done with their memory,
// and waits for them. The whole block.
__device__ inline void finish(const LayerView& view) {
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const bool last = threadIdx.x == 0 && runs(view) &&
                    signal_node(view, &view.state->arrivals[kSumsDone], gridDim.x,
                                view.control_layout.done, epoch_of(view));
  if (__any_sync(device::kFullWarp, last)) wait_for_node(view, kEndOfSumsPhase);
}

}  // namespace winnow::expert_parallel
