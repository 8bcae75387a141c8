// How a kernel tells the ranks of its node that it has come to some point. Device code only.
#pragma once

#include <cstdint>

#include "winnow/expert_parallel/device/wait.cuh"

namespace winnow::expert_parallel {

// The last of `parties` that comes here sets this rank's word of those at `words` (of the control
// memory, one for each rank of the node) at each of them, and gets true. One thread each, after
// what its party has written. `ticket` is 0 before and after.
__device__ inline bool tell_node(const LayerView& view, std::uint32_t* ticket,
                                 std::uint32_t parties, std::int64_t words, std::uint64_t value) {
  __threadfence();
  if (atomicAdd(ticket, 1u) != parties - 1) return false;
  *ticket = 0;
  __threadfence_system();
  for (int to = 0; to < view.topology.locals; ++to) {
    store_relaxed_system(
        reinterpret_cast<std::uint64_t*>(view.control.node[to] + words) + view.topology.local,
        value);
  }
  return true;
}

}  // namespace winnow::expert_parallel
