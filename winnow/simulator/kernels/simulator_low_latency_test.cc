// expert_parallel::low_latency in the simulator.
#include "winnow/simulator/testing/simulate.h"

namespace winnow::expert_parallel {

testing::Operation low_latency_operation();

namespace {

using simulator::BugsOf;
using simulator::PassingCase;
using simulator::PlantedBug;
using Action = simulator::Plant::Action;

const std::vector<PassingCase> kQuickCases = {{"1-ranks", {"eager"}}};
const std::vector<PassingCase> kThoroughCases = {};
const std::vector<PlantedBug> kQuickBugs = {};
const std::vector<PlantedBug> kThoroughBugs = {};
WINNOW_SIMULATOR_TESTS(SimulatorLowLatency, low_latency_operation(), kQuickCases, kThoroughCases,
                       kQuickBugs, kThoroughBugs);

}  // namespace
}  // namespace winnow::expert_parallel
