// compressor::backward of CUDA in the simulator.
#include "winnow/simulator/testing/simulate.h"

namespace winnow::compressor {

testing::Operation backward_operation();

namespace {

using simulator::beyond_a_pair;
using simulator::BugsOf;
using simulator::in_one_schedule;
using simulator::PassingCase;
using simulator::PlantedBug;
using enum simulator::Plant::Action;

const std::vector<PassingCase> kQuickCases = {
    {"f32-overlap", {"eager", "random:1"}}, {"bf16-csa", {"random:2"}}, {"f16-keys", {"random:3"}},
    {"bf16-hca", {"random:4"}, 4},  // clusters of eight
    {"bf16-large-overlap", {"random:1"}},
};
const std::vector<PassingCase> kThoroughCases = {
    {"f16-large-strided", {"random:2"}},
    {"bf16-many-large", {"random:3"}, 1},
    {"f32-hca", {"late"}, 8},
    {"bf16-hca", {"late", "random:5", "starved:0", "starved:63"}, 8},
    {"f32-overlap-128", {"random:6"}},  // of two, which exchange nothing
    {"f16-largest", {"late"}, 8},       // clusters of sixteen
    {"bf16-largest", {"random:7"}, 16},
    {"f32-strided", {"random:8"}},
    {"f16-ratio31-overlap", {"random:9"}},
    {"bf16-wide-result", {"eager"}},
    {"f32-many", {"random:10"}},
    {"bf16-many-windows", {"eager", "random:11"}, 1},
    {"f32-nan", {"eager"}},
};
constexpr const char* kFile = "compressor/backward/backward_cuda.cu";
const BugsOf large{kFile, "bf16-hca", 4}, cluster{kFile, "f32-hca", 8}, warps{kFile, "bf16-csa"},
    block{kFile, "f32-norm"}, groups{kFile, "f32-ratio31-overlap"}, rows{kFile, "f16-keys"},
    turns{kFile, "bf16-many-windows", 1};
const BugsOf course{kFile, "bf16-many-large", 1};
constexpr const char* kSent = "device::st_async_cluster(device::map_shared(own, threadIdx.x)";
constexpr const char* kLargeSent =
    "device::st_async_cluster(device::map_shared(sums_of_block, own_thread)";
constexpr const char* kStageWaited = "device::cp_async_wait<kStages - 1>();";
constexpr const char* kSumsOfWarp = "&sums[warp][lane * kColumns]) = sum;";
constexpr const char* kOfNorm = "params.d_norm_weight[result - biases] = total;";
constexpr const char* kOfBias = "(p.series - 1) * p.d) + column] = total;";
constexpr const char* kAddParts = "add_parts(const __grid_constant__";
const std::vector<PlantedBug> kQuickBugs = {
    cluster("NoBarrierBeforeOthersAreReached", "// all blocks run before one reaches another",
            drop),
    cluster("SumsOfBlocksBeforeTheyAreThere", "x = shared.sums[turn][0];", drop, 0, -1),
    beyond_a_pair(cluster("SumsForTwoBlocks", kSent, drop)),
    in_one_schedule(beyond_a_pair(large("LargeSumsForTwoBlocks", kLargeSent, drop))),
    large("NoBarrierBeforeOneSends", "// all blocks run before one sends", drop),
    large("LargeSumsBeforeTheyAreThere", "parity, \"columns\", turn);", drop),
    large("LargeSlotsBeforeTheyAreThere", "parity, \"slots\", stage);", drop),
    warps("StageBeforeItIsThere", kStageWaited, drop),
    in_one_schedule(block("PartsBeforeTheyAreWritten", "device::wait_for_kernel_before();", drop)),
};
const std::vector<PlantedBug> kThoroughBugs = {
    cluster("SumsForTheNextBlock", kSent, add, 1 << 24),
    cluster("SumsElsewhere", kSent, add, 8),
    large("LargeSumsElsewhere", kLargeSent, add, 8),
    large("LargeSumsOfOneBlockLess", "unsigned>(shares.blocks * sizeof(float2)));", add, -8, -1),
    large("WarpsBeforeTheyAreThere", "// the sums of all warps are there, and", drop),
    large("LastGradientsBeforeTheyAreThere", "// the gradients of the last window are there", drop),
    in_one_schedule(
        large("ColumnOfTheNextLane", "x[c] = __shfl_sync(device::kFullWarp, own,", add, 1)),
    course("CourseWrittenBeforeItIsGone", "// the course has been gone", drop),
    large("FirstCourseBeforeItIsThere", "// the first course is there", drop),
    cluster("SumsForAnotherRank", "device::map_shared(own, threadIdx.x)", add, 1),
    cluster("SumsOfOneBlockLess", "expect(there, static_cast<unsigned>(blocks) *", add, -8),
    warps("StageOfTheNeighbourBeforeItIsThere", kStageWaited, drop, 0, 1),
    turns("StageWrittenWhileItIsRead", "// the stage has been read", drop),
    warps("SpotsBeforeTheyAreThere", "// the windows are there", drop),
    turns("SpotsWrittenWhileTheyAreRead", "// the windows have been read", drop),
    warps("SumsOfWarpsBeforeTheyAreThere", "bar_sync<kMostColumns / kColumns>(", drop),
    warps("NormBeforeItIsThere", "// norm_weight is there", drop),
    warps("SumsOfWindowsBeforeTheyAreThere", "put_part(params, shared.gradients", drop, 0, -1),
    warps("SumsWhereAStageIsRead", "// all stages have been read", drop),
    rows("RowLoadedTooLate", "for (int half = 1; half < p.d; half *= 2) {", drop, 0, 1),
    rows("RowReadTooEarly", "const float scale = hadamard_scale(p);", drop, 0, -1),
    groups("SumsBeforeTheyAreThere", "template store<true>(joint.sum[own]);", drop, 0, 1),
    groups("SumsOfGroupsBeforeTheyAreThere", "// the sums of all groups are there", drop),
    block("PartsBeforeTheyAreAdded", kSumsOfWarp, drop, 0, 1),
    block.undo("SumsOfWarpsNotStored", kSumsOfWarp),
    block.move("SumsOfWarpsOfTheNextLane", kSumsOfWarp, 16),
    block.undo("NormGradientsNotStored", kOfNorm),
    block.move("NormGradientsOfTheNextColumn", kOfNorm, 4),
    block.undo("BiasGradientsNotStored", kOfBias),
    block.move("BiasGradientsOfTheNextColumn", kOfBias, 4),
    block("PartsOfTheNextBlock", kAddParts, shift_block, 1),
    block("PartsOfTheNextThread", kAddParts, shift_thread, 1),
};
WINNOW_SIMULATOR_TESTS(SimulatorCompressorBackward, backward_operation(), kQuickCases,
                       kThoroughCases, kQuickBugs, kThoroughBugs);

}  // namespace
}  // namespace winnow::compressor
