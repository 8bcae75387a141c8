// What the simulated tests of the indexer's kernels share.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "winnow/simulator/testing/simulate.h"

namespace winnow::indexer {

using simulator::all_cases;
using simulator::beyond_a_pair;
using simulator::BugsOf;
using simulator::in_one_schedule;
using simulator::joined;
using simulator::of_argument;
using simulator::of_threads;
using simulator::PassingCase;
using simulator::PlantedBug;
using simulator::under;
using Action = simulator::Plant::Action;
using enum simulator::Plant::Action;

inline const std::vector<std::string> kFew = simulator::schedules(1, {});
inline const std::vector<std::string> kMany = simulator::schedules(5, {0, 3, 5, 8, 12, 15});

// 75 items of a block: a barrier's count that is one too small ends a phase too early now and then.
inline constexpr const char* kManyItems = "bf16-sq300";

// Of the tests of backend cuda: the simulated device is one of compute capability 8.6, which has no
// other kernels for the operations, and blocks have 99 KiB of shared memory. To be called before
// the library asks.
inline bool simulate_any_gpu() {
  simulator::settings().compute_capability = 86;
  simulator::settings().shared_bytes = 99 * 1024;
  return true;
}

}  // namespace winnow::indexer
