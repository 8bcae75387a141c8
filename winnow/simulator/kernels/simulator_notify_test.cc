// expert_parallel::notify in the simulator.
#include "winnow/simulator/kernels/expert_parallel_simulation.h"

namespace winnow::expert_parallel {

testing::Operation notify_operation();

namespace {

testing::Operation simulated() {
  set_device(4);
  return notify_operation();
}

using simulator::BugsOf;
using simulator::PassingCase;
using simulator::PlantedBug;
using Action = simulator::Plant::Action;

const std::vector<PassingCase> kQuickCases = {{"1x1", {"eager"}}, {"1x4", {"eager", "late"}}, {"2x2", {"random:1"}}, {"no-token", {"random:2"}}};
const std::vector<PassingCase> kThoroughCases = {};
const std::vector<PlantedBug> kQuickBugs = {};
const std::vector<PlantedBug> kThoroughBugs = {};
WINNOW_SIMULATOR_TESTS(SimulatorNotify, simulated(), kQuickCases, kThoroughCases, kQuickBugs,
                       kThoroughBugs);

}  // namespace
}  // namespace winnow::expert_parallel
