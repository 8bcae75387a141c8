// Tells the other nodes what has broken this rank's layer. Device code only.
#pragma once

#include <cstdint>

#include "winnow/expert_parallel/cuda/wait.cuh"
#include "winnow/expert_parallel/cuda/wire.cuh"

namespace winnow::expert_parallel {

inline constexpr int kTellThreads = 32;

// The reporter's notice, which stands in this rank's memory, to its rail peers. `found`: what no
// kernel has found but the host, which the node hears of first; or nothing. One block.
template <class W>
__global__ void __launch_bounds__(kTellThreads)
    tell_fault_kernel(const __grid_constant__ LayerView view, int reporter, FaultNotice found) {
  const CudaTopology& topology = view.topology;
  if (found.phase != Phase::none) {
    if (broken(view)) return;
    __syncwarp();
    if (threadIdx.x == 0) report_fault(view, reporter, found);
    __syncwarp();
  }
  const std::int64_t notice = view.control_layout.notice(reporter);
  for (int step = 1; step < topology.nodes; ++step) {
    const int to = topology.rank_at((topology.node + step) % topology.nodes, topology.local);
    W::put(view.control, to, notice, view.control.local + notice, sizeof(FaultNotice));
    W::signal(view.control, to, view.control_layout.fault, std::uint64_t(reporter) + 1);
  }
}

}  // namespace winnow::expert_parallel
