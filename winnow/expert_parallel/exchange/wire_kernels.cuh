// The table of a wire's kernels. Included once in the library that has the wire's device code.
#pragma once

#include <cuda_runtime.h>

#include "winnow/device/common/launch.cuh"
#include "winnow/expert_parallel/cuda/barrier.cuh"
#include "winnow/expert_parallel/cuda/wire.h"
#include "winnow/expert_parallel/exchange/count_exchange_cuda.cuh"
#include "winnow/expert_parallel/exchange/exchange_cuda.cuh"
#include "winnow/expert_parallel/exchange/rail_cuda.cuh"
#include "winnow/expert_parallel/exchange/tell_fault.cuh"

namespace winnow::expert_parallel {

template <class W>
Wire make_wire() {
  Wire wire;
  wire.load = [] {
    int error = device::load_kernels(exchange_kernel<W>, barrier_kernel<W>, rail_send_kernel<W>,
                                     notify_kernel<W>, tell_fault_kernel<W>);
    if constexpr (W::kNeedsQuiet) {
      if (error == cudaSuccess) error = device::load_kernels(quiet_kernel<W>);
    }
    return error;
  };
  wire.exchange = [](const ExchangeParams& params, void* stream) -> int {
    return device::launch_early(exchange_kernel<W>, 1, kExchangeThreads, 0,
                                static_cast<cudaStream_t>(stream), params);
  };
  wire.barrier = [](const BarrierParams& params, void* stream) -> int {
    return device::launch(barrier_kernel<W>, 1, kBarrierThreads, 0,
                          static_cast<cudaStream_t>(stream), params);
  };
  wire.rail_send = [](const RailSendParams& params, int blocks, void* stream) -> int {
    return device::launch_early(rail_send_kernel<W>, blocks, kRailSendThreads, 0,
                                static_cast<cudaStream_t>(stream), params);
  };
  wire.quiet = []([[maybe_unused]] const LayerView& view, [[maybe_unused]] void* stream) -> int {
    if constexpr (W::kNeedsQuiet) {
      return device::launch(quiet_kernel<W>, 1, 1, 0, static_cast<cudaStream_t>(stream), view);
    } else {
      return cudaSuccess;
    }
  };
  wire.notify = [](const CountExchangeParams& params, void* stream) -> int {
    return device::launch(notify_kernel<W>, 1, kExchangeThreads, 0,
                          static_cast<cudaStream_t>(stream), params);
  };
  wire.tell_fault = [](const LayerView& view, int reporter, const FaultNotice& found,
                       void* stream) -> int {
    return device::launch(tell_fault_kernel<W>, 1, kTellThreads, 0,
                          static_cast<cudaStream_t>(stream), view, reporter, found);
  };
  return wire;
}

}  // namespace winnow::expert_parallel
