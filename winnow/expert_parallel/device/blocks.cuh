// How the blocks of a kernel meet, with a deadline. Device code only.
#pragma once

#include <cstdint>

#include "winnow/expert_parallel/device/wait.cuh"

namespace winnow::expert_parallel {

// Until all blocks have come, as wait_at_least() waits for other ranks. False: the layer is broken.
__device__ inline bool wait_for_blocks(const LayerView& view,
                                       const volatile std::uint32_t* arrived) {
  const std::uint64_t start = global_nanoseconds();
  for (std::uint32_t seen; (seen = *arrived) < gridDim.x;) {
    if (broken(view)) return false;
    const std::uint64_t elapsed = global_nanoseconds() - start;
    if (elapsed < view.timeout_ns) continue;
    const int rank = view.topology.rank;
    report_fault(view, rank, {gridDim.x, seen, elapsed, Phase::blocks, rank});
    return false;
  }
  return true;
}

// All blocks of a kernel, which run side by side: what any wrote before can be read after.
// `all_say(mine)` is the barrier of those threads of a block that meet, the first one among them:
// whether all of them say so. False: the layer is broken, and some blocks may not come; so it is
// when other work holds the SMs that they need until the deadline.
template <class Barrier>
__device__ __forceinline__ bool meet_blocks(const LayerView& view, const Barrier& all_say) {
  std::uint32_t* arrived = &view.state->arrivals[kBlocksArrived];
  std::uint32_t* left = &view.state->arrivals[kBlocksLeft];
  bool met = all_say(true);
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(arrived, 1u);
    met = met && wait_for_blocks(view, arrived);
    __threadfence();
    // Nobody looks any more when all have left.
    if (met && atomicAdd(left, 1u) == gridDim.x - 1) *left = *arrived = 0;
  }
  return all_say(met);
}

}  // namespace winnow::expert_parallel
