// What the GPU tests of the all-to-all share. Only for tests: needs GoogleTest.
#pragma once

#include <string>

#include "winnow/expert_parallel/testing/all_to_all_ranks.h"
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

}  // namespace winnow::expert_parallel
