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

const BugsOf kernel{"quantize_cuda.cu", "f32-d128"}, paged{"quantize_cuda.cu", "f32-d128-pages"},
    elements{"quantize_cuda.cu", "bf16-unaligned"}, row{"write_row.cuh", "f16-d128"};
constexpr const char* kPacks = "*reinterpret_cast<Pack*>(to) = *this;";
constexpr const char* kScale = "if (lane == 0) *scale_at = scale;";
const std::vector<PlantedBug> kQuickBugs = {
    in_one_schedule(row("LargestOfTheLane", "return __reduce_max_sync(", drop)),
    kernel.undo("ScalesNotStored", kScale),
};
const std::vector<PlantedBug> kThoroughBugs = {
    paged("SlotOfTheLane", "slot = __shfl_sync(device::kFullWarp, slot, 0);", drop),
    paged("SlotOfTheNextLane", "slot = __shfl_sync(device::kFullWarp, slot, 0);", add, 1),
    kernel.undo("RowsNotStored", kPacks),
    kernel.move("RowsOfTheNextLane", kPacks, 4),
    paged.move("RowsOfTheNextPlace", kPacks, 128),
    of_threads(224, 256, kernel.undo("RowsOfTheLastWarpNotStored", kPacks)),
    of_threads(31, 32, kernel.undo("LastColumnsNotStored", kPacks)),
    elements.undo("ElementsNotStored", "to[c] = elements[c];"),
    elements.move("ElementsOneFurther", "to[c] = elements[c];", 1),
    kernel.move("ScalesOfTheNextRow", kScale, 4),
    paged.undo("ScalesOfPagesNotStored", kScale),
    paged.move("ScalesOfTheNextPlace", kScale, 4),
};
TEST(SimulatorQuantizeTests, HaveTheirCasesAndLines) {
  simulator::expect_there(quantize_operation(), kQuickBugs);
  simulator::expect_there(quantize_operation(), kThoroughBugs);
}
void expect_found(const PlantedBug& bug) { simulator::expect_found(quantize_operation(), bug); }
const bool kQuickRegistered =
    simulator::register_bugs("Quick/SimulatorQuantizeBug", kQuickBugs, expect_found);
const bool kThoroughRegistered =
    simulator::register_bugs("Thorough/SimulatorQuantizeBug", kThoroughBugs, expect_found);

}  // namespace
}  // namespace winnow::indexer
