// expert_parallel::low_latency in the simulator.
#include "winnow/simulator/kernels/expert_parallel_simulation.h"

namespace winnow::expert_parallel {

testing::Operation low_latency_operation();

namespace {

testing::Operation simulated() {
  set_device(4);
  return low_latency_operation();
}

using simulator::BugsOf;
using simulator::PassingCase;
using simulator::PlantedBug;
using Action = simulator::Plant::Action;

const std::vector<PassingCase> kQuickCases = {{"1-ranks", {"eager"}}, {"2-ranks", {"late"}}, {"3-ranks", {"eager"}}, {"4-ranks", {"random:1"}}, {"4-ranks-bf16-halves", {"random:2"}}};
const std::vector<PassingCase> kThoroughCases = {{"2-ranks-bf16-halves", {"random:0"}}, {"3-ranks", {"random:1"}}, {"3-ranks-bf16-halves", {"random:2"}}, {"4-ranks", {"random:3"}}, {"4-ranks-bf16-halves", {"random:4"}}, {"power-of-two-by-column", {"random:5"}}, {"ue8m0", {"random:6"}}, {"fewer-columns", {"random:7"}}, {"no-experts", {"random:8"}}, {"all-to-all-experts", {"random:9"}}, {"wide-fp8", {"random:10"}}, {"wide-bf16", {"random:11"}}, {"parts-halves", {"random:12"}}, {"newest-first", {"random:13"}}, {"newest-first-shrink", {"random:14"}}, {"many-experts", {"random:15"}}};
const std::vector<PlantedBug> kQuickBugs = {};
const std::vector<PlantedBug> kThoroughBugs = {};
WINNOW_SIMULATOR_TESTS(SimulatorLowLatency, simulated(), kQuickCases, kThoroughCases,
                       kQuickBugs, kThoroughBugs);

}  // namespace
}  // namespace winnow::expert_parallel
