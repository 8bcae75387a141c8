// paged_xl::position_term of CUDA in the simulator. Its warps share nothing.
#include <gmock/gmock.h>

#include "winnow/simulator/testing/simulate.h"

namespace winnow::paged_xl {

testing::Operation position_term_operation();

namespace {

using simulator::BugsOf;
using simulator::in_one_schedule;
using simulator::of_threads;
using simulator::PassingCase;
using simulator::PlantedBug;
using enum simulator::Plant::Action;

const std::vector<PassingCase> kQuickCases = {
    {"f32-d32", {"eager"}},        {"bf16-d64", {"random:1"}},       {"f16-out-d80", {"random:2"}},
    {"f32-d256", {"late"}},        {"bf16-out-d192", {"random:3"}},  {"bf16-wide", {"starved:2"}},
    {"f32-reversed", {"eager"}},   {"bf16-bias-per-seq", {"eager"}}, {"bf16-splits", {"random:4"}},
    {"f32-splits", {"late"}},  // a warp has three tiles or more
    {"f32-no-context", {"eager"}},
};
const std::vector<PassingCase> kThoroughCases = {
    {"f32-splits", {"random:5"}},    {"bf16-out-splits", {"random:5"}},
    {"f16-out-wide", {"random:6"}},  {"f16-d128", {"random:6"}},
    {"bf16-no-sequence", {"eager"}}, {"f32-nothing-spare", {"eager"}},
    {"f16-out-d160", {"random:7"}},  {"bf16-reversed", {"random:7"}},
    {"f32-bias-per-seq", {"late"}},  {"f32-d112", {"starved:1"}},
};
const BugsOf tiles{"tile_cuda.cuh", "bf16-d64"}, tiles_of_rows{"tile_cuda.cuh", "f32-d32"},
    plan{"split_cuda.cuh", "bf16-d64"}, kernel{"position_term_cuda.cu", "bf16-d64"},
    splits{"position_term_cuda.cu", "f32-splits"}, narrow{"position_term_cuda.cu", "f16-out-d80"};
constexpr const char* kKernel = "position_term_kernel(const __grid_constant__";
constexpr const char* kTerms = "row_of<float>(p.matrix_bd, s, head)[column + token] = term;";
const std::vector<PlantedBug> kQuickBugs = {
    tiles("SumsOfTheNextLane", "sums[i] = keep + __shfl_xor_sync(", add, 1),
    plan("LongestOfTheLane", "work.longest = __reduce_max_sync(", drop),
};
const std::vector<PlantedBug> kThoroughBugs = {
    tiles("SumsOfTheLane", "sums[i] = keep + __shfl_xor_sync(", drop),
    tiles("RowsOfTheLane", "return __shfl_sync(device::kFullWarp, sums[0], source);", drop),
    tiles("RowsOfTheNextLane", "return __shfl_sync(device::kFullWarp, sums[0], source);", add, 2),
    tiles_of_rows("SumsOfOneRowOfTheLane", "sums[0] += __shfl_xor_sync(", drop),
    tiles_of_rows("SumsOfOneRowOfTheNextRow", "sums[0] += __shfl_xor_sync(", add, 4),
    kernel.undo("TermsNotStored", kTerms),
    kernel.move("TermsOfTheNextToken", kTerms, 4),
    of_threads(96, 128, splits.undo("TermsOfTheLastWarpNotStored", kTerms)),
    kernel.move("TermsOfTheTokenBefore", kTerms, -4),
    in_one_schedule(splits("TermThreadsOneFurther", kKernel, shift_thread, 1)),
    in_one_schedule(splits("TermBlocksOneFurther", kKernel, shift_block, 1)),
    in_one_schedule(splits("TermStridesTooLong", kKernel, shift_grid, 1)),
    in_one_schedule(splits("TermsOfOneWarpLess", kKernel, launch_threads, -32)),
    of_threads(0, 1, narrow.undo("NarrowTermOfTheFirstThreadNotStored", "= from_float<T>(term);")),
    narrow.undo("NarrowTermsNotStored", "= from_float<T>(term);"),
    narrow.move("NarrowTermsOfTheTokenBefore", "= from_float<T>(term);", -2),
    tiles("LengthsOfTheNextSequence", "return min(max(__ldg(data + s), 0), limit);", add, 4),
};
// Found as a wrong result, of which the report names who wrote it.
TEST(SimulatorWriters, AreNamedWhereAResultDiffers) {
  simulator::plant(kQuickBugs.front().plant, WINNOW_SOURCE_DIR);
  const simulator::Simulated simulated = simulator::simulate(position_term_operation(), "bf16-d64",
                                                             {}, simulator::kMultiprocessors, true);
  simulator::unplant();
  EXPECT_EQ(simulated.failed, "result");
  EXPECT_THAT(simulated.report, ::testing::ContainsRegex("the element was last written by thread "
                                                         "[0-9]+ .warp [0-9]+. of block .*, at "
                                                         "position_term_cuda.cu:[0-9]+"));
}

WINNOW_SIMULATOR_TESTS(SimulatorPositionTerm, position_term_operation(), kQuickCases,
                       kThoroughCases, kQuickBugs, kThoroughBugs);

}  // namespace
}  // namespace winnow::paged_xl
