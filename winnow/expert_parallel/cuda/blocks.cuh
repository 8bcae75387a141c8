// How the blocks of a kernel meet, with a deadline. Device code only.
#pragma once

#include <cstdint>

#include "winnow/expert_parallel/cuda/wait.cuh"

namespace winnow::expert_parallel {

// A barrier of all blocks of a kernel, which must run at the same time: each can read after it what
// any wrote before it. `all_say(mine)` is a barrier of the threads of a block that take part,
// thread 0 among them, and says whether `mine` is true in all of them. False: the layer is broken
// and some blocks may not have come, as happens when other work holds their SMs until the deadline.
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
    // The last to leave clears the counters, which nobody reads any more. No fence orders that
    // behind the others' accesses, so it is strong as they are.
    if (met && arrive(left) == gridDim.x - 1) {
      device::st_relaxed_sys(left, 0);
      device::st_relaxed_sys(arrived, 0);
    }
  }
  return all_say(met);
}

}  // namespace winnow::expert_parallel
