// How a kernel tells the ranks of its node that it has come to some point, and waits until they
// have. Device code only.
#pragma once

#include <cstdint>

#include "winnow/device/common/warp.cuh"
#include "winnow/expert_parallel/cuda/wait.cuh"

namespace winnow::expert_parallel {

// Whether the caller is the last of `parties`, so that it may tell others what all have written.
// Called by one thread of each party, after the party's writes. `arrivals` is 0 before and after.
__device__ inline bool last_to_signal(std::uint64_t* arrivals, std::uint32_t parties) {
  __threadfence();
  if (arrive(arrivals) != parties - 1) return false;
  __threadfence_system();
  *arrivals = 0;
  return true;
}

// Sets this rank's word in the control memory of local rank `local`, which has one for each rank of
// the node from offset `words` on. Called after last_to_signal().
__device__ __forceinline__ void signal(const LayerView& view, int local, std::int64_t words,
                                       std::uint64_t value) {
  device::st_relaxed_sys(
      reinterpret_cast<std::uint64_t*>(view.control.node[local] + words) + view.topology.local,
      value);
}

// The last of `parties` sets this rank's word at all ranks of the node, and gets true.
__device__ inline bool signal_node(const LayerView& view, std::uint64_t* arrivals,
                                   std::uint32_t parties, std::int64_t words, std::uint64_t value) {
  if (!last_to_signal(arrivals, parties)) return false;
  for (int to = 0; to < view.topology.locals; ++to) signal(view, to, words, value);
  return true;
}

// Whether all ranks of the node are done with this rank's memory, as ControlLayout::done says.
// Called by a warp; a wait that expires names `phase`.
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
