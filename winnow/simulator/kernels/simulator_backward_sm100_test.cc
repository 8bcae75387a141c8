// sparse_mla::backward of sm100 in the simulator: every kernel of the backend, on a simulated
// Blackwell.
#include "winnow/simulator/testing/simulate.h"
#include "winnow/sparse_mla/cases.h"

namespace winnow::sparse_mla {

testing::Operation backward_operation(std::int64_t most_queries);
std::vector<testing::Benchmark> backward_benchmarks() { return {}; }

namespace {

using simulator::PassingCase;
using simulator::Plant;
using simulator::PlantedBug;
using Action = Plant::Action;

// Before anybody asks which GPU there is.
const bool kBlackwell = [] {
  simulator::settings().compute_capability = 100;
  return true;
}();

// The case table, on the backend that nobody gets unasked.
testing::Operation forced_operation() {
  testing::Operation operation = backward_operation(64);
  for (testing::Case& one : operation.cases) {
    one.run = [run = one.run](testing::Target target) {
      target.options.backend = Backend::sm100;
      return run(target);
    };
  }
  return operation;
}

const std::vector<PassingCase> kQuickCases = {
    {"bf16-h16", {"eager"}},
};
const std::vector<PassingCase> kThoroughCases = [] {
  std::vector<PassingCase> all;
  for (const testing::Case& one : backward_operation(64).cases) {
    if (one.on_gpu) all.push_back({one.name, {"eager"}});
  }
  return all;
}();
const std::vector<PlantedBug> kQuickBugs = {};
const std::vector<PlantedBug> kThoroughBugs = {};

WINNOW_SIMULATOR_TESTS(SimulatorBackwardSm100, forced_operation(), kQuickCases, kThoroughCases,
                       kQuickBugs, kThoroughBugs);

}  // namespace
}  // namespace winnow::sparse_mla
