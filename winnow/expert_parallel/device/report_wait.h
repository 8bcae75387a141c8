// How the host waits for what the kernels of a call tell it. Internal.
#pragma once

#include <chrono>
#include <cstdint>
#include <thread>

#include <cuda_runtime_api.h>

#include "winnow/expert_parallel/transport/transport.h"

namespace winnow::expert_parallel {

// Until `ticket`, in pinned memory that the kernels on `stream` write, is `number`.
// throw_fault(): throws if a kernel's wait has expired. check(cuda_error, what): throws on errors.
template <class ThrowFault, class Check>
void wait_for_report(const std::uint64_t& ticket, std::uint64_t number, cudaStream_t stream,
                     const ThrowFault& throw_fault, const Check& check) {
  constexpr std::chrono::milliseconds kLookAtStream{20};
  using Clock = std::chrono::steady_clock;
  const auto there = [&] { return load_acquire(&ticket) == number; };
  auto next_look = Clock::now() + kLookAtStream;
  while (!there()) {
    throw_fault();
    std::this_thread::yield();  // a sleep would be longer than what is left to wait for
    if (Clock::now() < next_look) continue;
    next_look = Clock::now() + kLookAtStream;
    const cudaError_t state = cudaStreamQuery(stream);
    if (state == cudaErrorNotReady) continue;
    check(state, "the stream");
    throw_fault();
    if (there()) break;
    check(cudaErrorUnknown, "the kernels ended without a report");
  }
}

}  // namespace winnow::expert_parallel
