// Tests of notify that run on the CPU and on the first GPU. Only for tests: needs GoogleTest.
#pragma once

#include <cstdlib>
#include <exception>
#include <ostream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "winnow/core/device_memory.h"
#include "winnow/core/error.h"
#include "winnow/expert_parallel/notify/notify.h"
#include "winnow/expert_parallel/testing/ranks.h"

namespace winnow {

// How GoogleTest shows the parameter of a test.
inline void PrintTo(const Device& device, std::ostream* stream) { *stream << to_string(device); }

}  // namespace winnow

namespace winnow::expert_parallel {

inline constexpr Device kGpu{DeviceType::cuda, 0};

// Every stream of the process a hardware queue of its own: ranks wait for each other on the GPU.
// Before CUDA starts.
inline const int kConnections = setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);

// Instances are called Cpu and Gpu; the latter are skipped where there is none.
class OnEachDevice : public ::testing::TestWithParam<Device> {
 protected:
  void SetUp() override {
    if (device().type == DeviceType::cpu) return;
    if (!built_with_cuda()) GTEST_SKIP() << "this build has no CUDA kernels";
    if (gpus().gpus.empty()) GTEST_SKIP() << gpus().reason;
    if (gpus().gpus[0].compute_major < 9) GTEST_SKIP() << "needs compute capability 9.0";
  }
  static Device device() { return GetParam(); }
};

// What() of the Error that each rank throws, empty for none.
inline std::vector<std::string> texts(RankTeam& team, const RankBody& body) {
  std::vector<std::string> result;
  for (const std::exception_ptr& thrown : team.try_run(body)) {
    result.emplace_back();
    if (thrown == nullptr) continue;
    try {
      std::rethrow_exception(thrown);
    } catch (const Error& error) {
      result.back() = error.what();
    }
  }
  return result;
}

inline NotifierConfig on(Device device, NotifierConfig config) {
  config.device = device;
  return config;
}

}  // namespace winnow::expert_parallel
