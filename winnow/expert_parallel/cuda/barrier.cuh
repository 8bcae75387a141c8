// Barriers of GPU layers. Device code only.
#pragma once

#include <cstdint>

#include "winnow/expert_parallel/cuda/view.h"
#include "winnow/expert_parallel/cuda/wait.cuh"
#include "winnow/expert_parallel/cuda/wire.h"

namespace winnow::expert_parallel {

inline constexpr int kBarrierThreads = 128;

// Each rank signals its node and then, in a world barrier, its rail peers: a signal from a rail
// peer means that all ranks of its node have arrived. Rows of ControlLayout::arrived: the node's
// round of a world barrier, that of a node barrier, the rail's round.
template <class W>
__global__ void __launch_bounds__(kBarrierThreads)
    barrier_kernel(const __grid_constant__ BarrierParams params) {
  const LayerView& view = params.view;
  const CudaTopology& topology = view.topology;
  if (broken(view)) return;
  const int kind = params.node_only ? 1 : 0;
  const std::uint64_t round =
      *const_cast<const volatile std::uint64_t*>(&view.state->rounds[kind]) + 1;
  if (__syncthreads_or(threadIdx.x == 0 && told_of_fault(view))) return;
  if (threadIdx.x == 0) view.state->rounds[kind] = round;
  const Phase phase = params.node_only ? Phase::node_barrier : Phase::world_barrier;
  const auto offset = [&](int row, int rank) {
    return view.control_layout.arrived +
           (std::int64_t(row) * topology.world + rank) * std::int64_t(sizeof(std::uint64_t));
  };
  const auto word = [&](int row, int rank) {
    return reinterpret_cast<const std::uint64_t*>(view.control.local + offset(row, rank));
  };

  for (int to = threadIdx.x; to < topology.locals; to += blockDim.x) {
    __threadfence_system();
    device::st_release_sys(
        reinterpret_cast<std::uint64_t*>(view.control.node[to] + offset(kind, topology.rank)),
        round);
  }
  const auto mate = [&](int i) { return topology.rank_at(topology.node, i); };
  if (!wait_for_all(
          view, topology.locals, [&](int i) { return word(kind, mate(i)); }, round, phase, mate)) {
    return;
  }
  if (params.node_only || topology.nodes == 1) return;
  for (int step = 1; step < topology.nodes; ++step) {
    const int to = topology.rank_at((topology.node + step) % topology.nodes, topology.local);
    W::signal(view.control, to, offset(2, topology.rank), round);
  }
  const auto peer = [&](int i) {  // the other nodes
    return topology.rank_at((topology.node + 1 + i) % topology.nodes, topology.local);
  };
  wait_for_all(
      view, topology.nodes - 1, [&](int i) { return word(2, peer(i)); }, round, phase, peer);
}

}  // namespace winnow::expert_parallel
