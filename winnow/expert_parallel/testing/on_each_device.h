// Tests that run on the CPU and on the first GPU. Only for tests: needs GoogleTest.
#pragma once

#include <ostream>
#include <string>

#include <gtest/gtest.h>

#include "winnow/core/device.h"
#include "winnow/expert_parallel/testing/gpus.h"

namespace winnow {

// How GoogleTest shows the parameter of a test.
inline void PrintTo(const Device& device, std::ostream* stream) { *stream << to_string(device); }

}  // namespace winnow

namespace winnow::expert_parallel {

// Instances are called Cpu and Gpu; the latter are skipped where there is none, and `make test-gpu`
// runs those of the programs that the Makefile names.
class OnEachDevice : public ::testing::TestWithParam<Device> {
 protected:
  void SetUp() override {
    if (!on_gpu()) return;
    if (const std::string obstacle = gpu_obstacle(); !obstacle.empty()) GTEST_SKIP() << obstacle;
  }
  static Device device() { return GetParam(); }
  static bool on_gpu() { return device().type == DeviceType::cuda; }
};

}  // namespace winnow::expert_parallel
