// How the blocks of a kernel meet, with a deadline. Device code only.
#pragma once

#include <cstdint>

#include "winnow/expert_parallel/cuda/wait.cuh"

namespace winnow::expert_parallel {

// All blocks of a kernel, which run side by side: what any wrote before can be read after.
// `all_say(mine)` is the barrier of those threads of a block that meet, the first one among them:
// whether all of them say so. False: the layer is broken, and some blocks may not come; so it is
// when other work holds the SMs that they need until the deadline.
template <class Barrier>
__device__ __forceinline__ bool meet_blocks(const LayerView& view, const Barrier& all_say) {
  std::uint64_t* arrived = &view.state->arrivals[kBlocksArrived];
  std::uint64_t* left = &view.state->arrivals[kBlocksLeft];
  bool met = all_say(true);
  if (threadIdx.x == 0) {
    __threadfence();
    arrive(arrived);
    met = met && wait_at_least(view, arrived, gridDim.x, Phase::blocks, view.topology.rank);
    __threadfence();
    // Nobody looks any more when all have left.
    if (met && arrive(left) == gridDim.x - 1) *left = *arrived = 0;
  }
  return all_say(met);
}

}  // namespace winnow::expert_parallel
