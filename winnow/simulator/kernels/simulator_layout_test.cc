// expert_parallel::layout in the simulator.
#include "winnow/simulator/kernels/expert_parallel_simulation.h"

namespace winnow::expert_parallel {

testing::Operation layout_operation();

namespace {

using simulator::BugsOf;
using simulator::PassingCase;
using simulator::PlantedBug;
using Action = simulator::Plant::Action;

const std::vector<PassingCase> kQuickCases = {{"dropped", {"eager", "random:1"}}};
const std::vector<PassingCase> kThoroughCases = {{"distinct", {"random:2"}}};
const std::vector<PlantedBug> kQuickBugs = {};
const std::vector<PlantedBug> kThoroughBugs = {};
WINNOW_SIMULATOR_TESTS(SimulatorLayout, layout_operation(), kQuickCases, kThoroughCases, kQuickBugs,
                       kThoroughBugs);

}  // namespace
}  // namespace winnow::expert_parallel
