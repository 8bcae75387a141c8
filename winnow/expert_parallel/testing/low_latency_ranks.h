// Three ranks with their low-latency tensors, on the CPU and on a GPU. Only for tests: needs
// GoogleTest.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "winnow/core/device_memory.h"
#include "winnow/expert_parallel/low_latency/low_latency.h"
#include "winnow/expert_parallel/testing/all_to_all_ranks.h"
#include "winnow/expert_parallel/testing/low_latency_problem.h"
#include "winnow/expert_parallel/testing/on_each_device.h"

namespace winnow::expert_parallel {

// Three ranks, each a thread with a layer and tensors of its own.
class ThreeRanks : public OnEachDevice {
 protected:
  static constexpr int kWorld = 3;
  ThreeRanks() : rounds_(make_rounds(problem_)) {}

  // Makes a layer, a place and tensors on every rank.
  void make(bool shrink, std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
    layers_.resize(kWorld);
    places_.resize(kWorld);
    tensors_.resize(kWorld);
    expect_all_return(run([&](int rank) {
      LowLatencyConfig config = problem_.config();
      config.enable_shrink = shrink;
      config.timeout = timeout;
      config.device = device();
      layers_[std::size_t(rank)] =
          std::make_unique<LowLatency>(ranks_.transport(rank), ranks_.store(), config);
      renew(rank);
    }));
  }
  void renew(int rank) {
    const auto me = std::size_t(rank);
    tensors_[me].reset();
    places_[me] = std::make_unique<Place>(device());
    tensors_[me] = std::make_unique<LowLatencyTensors>(*places_[me], problem_, rounds_[0], rank);
  }
  LowLatency& layer(int rank) { return *layers_[std::size_t(rank)]; }
  LowLatencyTensors& tensors(int rank) { return *tensors_[std::size_t(rank)]; }
  const Place& place(int rank) { return *places_[std::size_t(rank)]; }
  template <class Body>
  std::vector<Outcome> run(const Body& body) {
    return ranks_.run([&](int rank) {
      const DeviceGuard guard(device());
      body(rank);
    });
  }
  // Makes one more call on a GPU, since it reports errors of other ranks and of kernels only then.
  void settle(int rank) {
    if (!on_gpu()) return;
    place(rank).wait();
    layer(rank).dispatch(tensors(rank).dispatch_args(CallPart::both));
  }
  void expect_working() {
    expect_all_return(
        run([&](int rank) { expect_passed(run_rank(layer(rank), problem_, rounds_)); }));
  }

  LowLatencyProblem problem_{.name = "three", .world = kWorld, .rounds = 2};
  std::vector<LowLatencyRound> rounds_;
  Ranks ranks_{kWorld};
  std::vector<std::unique_ptr<LowLatency>> layers_;
  std::vector<std::unique_ptr<Place>> places_;
  std::vector<std::unique_ptr<LowLatencyTensors>> tensors_;
};

}  // namespace winnow::expert_parallel
