// Tests of notify that run on the CPU and on the first GPU. Only for tests: needs GoogleTest.
#pragma once

#include <exception>
#include <ostream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "winnow/core/error.h"
#include "winnow/expert_parallel/notify/notify.h"
#include "winnow/expert_parallel/testing/gpus.h"
#include "winnow/expert_parallel/testing/ranks.h"

namespace winnow {

// How GoogleTest shows the parameter of a test.
inline void PrintTo(const Device& device, std::ostream* stream) { *stream << to_string(device); }

}  // namespace winnow

namespace winnow::expert_parallel {

// Instances are called Cpu and Gpu; the latter are skipped where there is none.
class OnEachDevice : public ::testing::TestWithParam<Device> {
 protected:
  void SetUp() override {
    if (device().type == DeviceType::cpu) return;
    if (const std::string obstacle = gpu_obstacle(); !obstacle.empty()) GTEST_SKIP() << obstacle;
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
