// What the GPU tests of the all-to-all share: ranks that are threads on one GPU, each with a place
// of its own. Only for tests: needs GoogleTest.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "winnow/core/device_memory.h"
#include "winnow/expert_parallel/all_to_all_test_ranks.h"
#include "winnow/expert_parallel/testing/gpus.h"

#if WINNOW_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace winnow::expert_parallel {

#if WINNOW_WITH_CUDA
inline void check(cudaError_t error) { ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error); }
#endif

class GpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string obstacle = gpu_obstacle(); !obstacle.empty()) GTEST_SKIP() << obstacle;
  }
  static void expect_as_oracle(const Problem& problem) {
    SCOPED_TRACE(describe(problem));
    expect_passed(run_in_process(problem, kGpu));
  }
};

inline Config on_gpu(Config config) {
  config.device = kGpu;
  return config;
}

// The layers of a world on the GPU, and where each rank keeps its tensors.
class GpuWorld {
 public:
  explicit GpuWorld(const Config& config, int world_size) : ranks_(world_size) { make(config); }

  const Ranks& ranks() const { return ranks_; }
  AllToAll& layer(int rank) { return *layers_[std::size_t(rank)]; }
  const Place& place(int rank) const { return *places_[std::size_t(rank)]; }
  Layers& layers() { return layers_; }

  template <class Body>
  std::vector<Outcome> run(const Body& body) const {
    return ranks_.run([&](int rank) {
      const DeviceGuard guard(kGpu);
      body(rank);
    });
  }
  void make(const Config& config) {
    places_.clear();
    for (int rank = 0; rank < ranks_.size(); ++rank) {
      places_.push_back(std::make_unique<Place>(kGpu));
    }
    layers_ = ranks_.layers(on_gpu(config));
  }

 private:
  Ranks ranks_;
  std::vector<std::unique_ptr<Place>> places_;
  Layers layers_;
};

// What a rank gives to a dispatch of small_config(), on the GPU.
struct GpuGiven {
  Tensor input, indices, weights;
  DispatchArgs args;

  explicit GpuGiven(const Place& place, const Given& given = Given())
      : input(place.copy(given.input)),
        indices(place.copy(given.indices)),
        weights(place.copy(given.weights)) {
    args.input = input;
    args.expert_indices = indices;
    args.stream = place.stream();
  }
};

}  // namespace winnow::expert_parallel
