// A rank whose kernels are late, although its host is not. Only for tests in builds with CUDA.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <thread>

#include <cuda_runtime_api.h>

#include "winnow/expert_parallel/all_to_all/all_to_all.h"
#include "winnow/expert_parallel/testing/all_to_all_problem.h"
#include "winnow/expert_parallel/testing/rank_device.h"

namespace winnow::expert_parallel {

// Delays by `time` what is queued on the stream (a cudaStream_t) from now on, as a long kernel
// would.
inline void hold_up(void* stream, std::chrono::milliseconds time) {
  const auto sleep = [](void* milliseconds) {
    std::this_thread::sleep_for(
        std::chrono::milliseconds(reinterpret_cast<std::intptr_t>(milliseconds)));
  };
  void* const milliseconds = reinterpret_cast<void*>(static_cast<std::intptr_t>(time.count()));
  if (cudaLaunchHostFunc(static_cast<cudaStream_t>(stream), sleep, milliseconds) != cudaSuccess) {
    throw std::runtime_error("the stream cannot be held up");
  }
}
inline void hold_up(const RankDevice& place, std::chrono::milliseconds time) {
  hold_up(place.stream().handle, time);
}

// What a rank gives to a dispatch for which its host does not wait. Must live until the kernels
// end.
struct UnwaitedDispatch {
  Tensor input, indices;
  DispatchArgs args;

  UnwaitedDispatch(const RankDevice& place, const Round& round, int rank)
      : input(place.copy(round.ranks[std::size_t(rank)].input)),
        indices(place.copy(round.ranks[std::size_t(rank)].expert_indices)) {
    args.input = input;
    args.expert_indices = indices;
    args.worst_case_rows = round.most_rows();
    args.stream = place.stream();
  }
};

}  // namespace winnow::expert_parallel
