// Helpers of the tests of notify. Only for tests: needs GoogleTest.
#pragma once

#include <exception>
#include <string>
#include <vector>

#include "winnow/core/error.h"
#include "winnow/expert_parallel/notify/notify.h"
#include "winnow/expert_parallel/testing/on_each_device.h"
#include "winnow/expert_parallel/testing/ranks.h"

namespace winnow::expert_parallel {

// For each rank, the text of the Error that it throws in `body`, or "".
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
