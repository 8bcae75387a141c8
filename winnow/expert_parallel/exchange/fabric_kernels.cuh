// The kernels of barriers and of faults, and the table of all kernels of a fabric. Included once in
// the library that has the fabric's device code.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

#include "winnow/device/common/launch.cuh"
#include "winnow/expert_parallel/cuda/fabric.cuh"
#include "winnow/expert_parallel/cuda/fabric.h"
#include "winnow/expert_parallel/cuda/wait.cuh"
#include "winnow/expert_parallel/exchange/count_exchange_cuda.cuh"
#include "winnow/expert_parallel/exchange/exchange_cuda.cuh"
#include "winnow/expert_parallel/exchange/rail_cuda.cuh"

namespace winnow::expert_parallel {

inline constexpr int kBarrierThreads = 128;

// Each rank signals its node and then, in a world barrier, its rail peers: a signal from a rail
// peer means that all ranks of its node have arrived. Rows of ControlLayout::arrived: the node's
// round of a world barrier, that of a node barrier, the rail's round.
template <class Fabric>
__global__ void __launch_bounds__(kBarrierThreads)
    barrier_kernel(const __grid_constant__ BarrierParams params) {
  const LayerView& view = params.view;
  const CudaTopology& topology = view.topology;
  const bool was_broken = broken(view);  // all of the block or none go on
  const int kind = params.node_only ? 1 : 0;
  const std::uint64_t round =
      *const_cast<const volatile std::uint64_t*>(&view.state->rounds[kind]) + 1;
  if (__syncthreads_or(was_broken || (threadIdx.x == 0 && fault_signalled(view)))) return;
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
    Fabric::signal(view.control, to, offset(2, topology.rank), round);
  }
  const auto peer = [&](int i) {  // the other nodes
    return topology.rank_at((topology.node + 1 + i) % topology.nodes, topology.local);
  };
  wait_for_all(
      view, topology.nodes - 1, [&](int i) { return word(2, peer(i)); }, round, phase, peer);
}

inline constexpr int kSignalThreads = 32;

// The reporter's notice, which stands in this rank's memory, to its rail peers. `found`: what no
// kernel has found but the host, which the node learns of first; or nothing. One block.
template <class Fabric>
__global__ void __launch_bounds__(kSignalThreads)
    signal_fault_kernel(const __grid_constant__ LayerView view, int reporter, FaultNotice found) {
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
    Fabric::put(view.control, to, notice, view.control.local + notice, sizeof(FaultNotice));
    Fabric::signal(view.control, to, view.control_layout.fault, std::uint64_t(reporter) + 1);
  }
}

template <class Fabric>
FabricKernels make_fabric() {
  FabricKernels fabric;
  fabric.load = [] {
    int error = device::load_kernels(exchange_kernel<Fabric>, barrier_kernel<Fabric>,
                                     rail_send_kernel<Fabric>, notify_kernel<Fabric>,
                                     signal_fault_kernel<Fabric>);
    if constexpr (Fabric::kNeedsQuiet) {
      if (error == cudaSuccess) error = device::load_kernels(quiet_kernel<Fabric>);
    }
    return error;
  };
  fabric.exchange = [](const ExchangeParams& params, void* stream) -> int {
    return device::launch_early(exchange_kernel<Fabric>, 1, kExchangeThreads, 0,
                                static_cast<cudaStream_t>(stream), params);
  };
  fabric.barrier = [](const BarrierParams& params, void* stream) -> int {
    return device::launch(barrier_kernel<Fabric>, 1, kBarrierThreads, 0,
                          static_cast<cudaStream_t>(stream), params);
  };
  fabric.rail_send = [](const RailSendParams& params, int blocks, void* stream) -> int {
    return device::launch_early(rail_send_kernel<Fabric>, blocks, kRailSendThreads, 0,
                                static_cast<cudaStream_t>(stream), params);
  };
  fabric.quiet = []([[maybe_unused]] const LayerView& view, [[maybe_unused]] void* stream) -> int {
    if constexpr (Fabric::kNeedsQuiet) {
      return device::launch(quiet_kernel<Fabric>, 1, 1, 0, static_cast<cudaStream_t>(stream), view);
    } else {
      return cudaSuccess;
    }
  };
  fabric.notify = [](const CountExchangeParams& params, void* stream) -> int {
    return device::launch(notify_kernel<Fabric>, 1, kExchangeThreads, 0,
                          static_cast<cudaStream_t>(stream), params);
  };
  fabric.signal_fault = [](const LayerView& view, int reporter, const FaultNotice& found,
                           void* stream) -> int {
    return device::launch(signal_fault_kernel<Fabric>, 1, kSignalThreads, 0,
                          static_cast<cudaStream_t>(stream), view, reporter, found);
  };
  return fabric;
}

}  // namespace winnow::expert_parallel
