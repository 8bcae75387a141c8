// indexer::quantize in the simulator: every case of its table.
#include "winnow/simulator/indexer_simulation.h"

namespace winnow::indexer {

testing::Operation quantize_operation();

namespace {

TEST(SimulatorQuantize, EveryCasePasses) {
  int cases = 0;
  for (const testing::Case& one : quantize_operation().cases) {
    if (!one.on_gpu || one.name.ends_with("many")) continue;  // which takes long and shows no more
    simulator::expect_passes(quantize_operation(), {one.name, {"random:1"}});
    ++cases;
  }
  EXPECT_GT(cases, 50);
}

}  // namespace
}  // namespace winnow::indexer
