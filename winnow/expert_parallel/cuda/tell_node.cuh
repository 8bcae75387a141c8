// How a kernel tells the ranks of its node that it has come to some point, and waits until they
// have. Device code only.
#pragma once

#include <cstdint>

#include "winnow/device/common/warp.cuh"
#include "winnow/expert_parallel/cuda/wait.cuh"

namespace winnow::expert_parallel {

// The last of `parties` that comes here sets this rank's word of those at `words` (of the control
// memory, one for each rank of the node) at each of them, and gets true. One thread each, after
// what its party has written. `arrivals` is 0 before and after.
__device__ inline bool tell_node(const LayerView& view, std::uint64_t* arrivals,
                                 std::uint32_t parties, std::int64_t words, std::uint64_t value) {
  __threadfence();
  if (arrive(arrivals) != parties - 1) return false;
  *arrivals = 0;
  __threadfence_system();
  for (int to = 0; to < view.topology.locals; ++to) {
    device::st_relaxed_sys(
        reinterpret_cast<std::uint64_t*>(view.control.node[to] + words) + view.topology.local,
        value);
  }
  return true;
}

// Whether all ranks of the node are done with this rank's memory, as ControlLayout::done says. By a
// warp; `phase` is what expires.
__device__ inline bool wait_for_node(const LayerView& view, Phase phase) {
  bool done = true;
  const auto* words =
      reinterpret_cast<const std::uint64_t*>(view.control.local + view.control_layout.done);
  for (int local = threadIdx.x % 32; local < view.topology.locals; local += 32) {
    done = done && wait_at_least(view, words + local, epoch_of(view), phase,
                                 view.topology.rank_at(view.topology.node, local));
  }
  return __all_sync(device::kFullWarp, done);
}

}  // namespace winnow::expert_parallel
