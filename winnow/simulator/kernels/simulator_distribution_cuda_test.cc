// sparse_mla::distribution of every GPU in the simulator.
#include <string>
#include <vector>

#include "winnow/simulator/kernels/attention_cuda_simulation.h"
#include "winnow/sparse_mla/cases.h"

namespace winnow::sparse_mla {

testing::Operation distribution_operation();

namespace {

const std::vector<PassingCase> kQuickCases = {
    {"bf16-h64", schedules(1, {3})},      {"bf16-h128", {"random:2"}},
    {"f16-d512-h16-k100", {"late"}},      {"bf16-length-ragged", {"random:4"}},
    {"bf16-some-nothing", {"starved:5"}}, {"bf16-dense-ragged", {"late"}},
    {"bf16-extra-h0", {"eager"}},         {"f16-extra-range-list", {"random:5"}},
};
const std::vector<PassingCase> kThoroughCases =
    all_cases(distribution_operation(), {"sq4096", "sq300", "skv20000"});

// Eight tiles; and blocks of heads one behind the other.
const BugsOf bug{"distribution_cuda.cuh", "bf16-k512"}, heads{"distribution_cuda.cuh", "bf16-h128"};

const std::vector<PlantedBug> kQuickBugs = {
    race(bug("NoWaitForRows", "cp_async_wait<0>();  // the thread's copies", drop)),
};
const std::vector<PlantedBug> kThoroughBugs = {
    race(bug("NoBarrierBehindRows", "the tile is there, and the one", drop)),
    race(bug("WaitForTheTileBefore", "cp_async_wait<0>();  // the thread's copies", add, 1)),
    race(bug("NoCommit", "cp_async_commit();  // of the next tile", drop)),
    race(bug("NoBarrierBehindLogits", "the logits are there", drop)),
    race(bug("NoBarrierBehindTheLastSums", "the sums of the last tile", drop)),
    race(bug("NoBarrierBehindBounds", "the bounds are there", drop)),
    race(heads("LastTileReplacedEarly", "the sums of the last tile", drop)),
    saying("result: ", bug("NoSums", "sums[8 * n + 2 * lane + e].store", drop)),
    bug("LateSums", "sums[8 * n + 2 * lane + e].store", delay),
    bug("SumsElsewhere", "sums[8 * n + 2 * lane + e].store", add, 4),
};

// Where a block may have more, the queries are in four parts.
TEST(SimulatorDistributionCudaLarge, Passes) {
  expect_passes_with_much_memory(distribution_operation(), kQuickCases, 3);
}
TEST(ThoroughDistributionCudaLarge, Passes) {
  expect_passes_with_much_memory(distribution_operation(), kQuickCases, kQuickCases.size());
}

WINNOW_SIMULATOR_TESTS(SimulatorDistributionCuda, distribution_operation(), kQuickCases,
                       kThoroughCases, kQuickBugs, kThoroughBugs);

}  // namespace
}  // namespace winnow::sparse_mla
