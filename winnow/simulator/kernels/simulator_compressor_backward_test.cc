// compressor::backward of CUDA in the simulator.
#include "winnow/simulator/testing/simulate.h"

namespace winnow::compressor {

testing::Operation backward_operation();

namespace {

using simulator::BugsOf;
using simulator::in_one_schedule;
using simulator::PassingCase;
using simulator::PlantedBug;
using enum simulator::Plant::Action;

const std::vector<PassingCase> kQuickCases = {
    {"f32-overlap", {"eager", "random:1"}},
    {"bf16-csa", {"random:2"}},
    {"f16-keys", {"random:3"}},
    {"bf16-hca", {"random:4"}},
    {"bf16-large-overlap", {"random:1"}},
};
const std::vector<PassingCase> kThoroughCases = {
    {"f16-large-strided", {"random:2"}},
    {"bf16-many-large", {"random:3"}, 1},
    {"f32-hca", {"late"}},
    {"bf16-hca", {"late", "random:5", "starved:0", "starved:63"}, 8},
    {"f32-overlap-128", {"random:6"}},
    {"f16-largest", {"late"}},  // columns of a warp that are those of one lane
    {"bf16-largest", {"random:7"}, 16},
    {"f32-strided", {"random:8"}},
    {"f16-ratio31-overlap", {"random:9"}},
    {"f32-hadamard-groups", {"random:12"}},
    {"bf16-wide-result", {"eager"}},
    {"f32-many", {"random:10"}},
    {"bf16-many-windows", {"eager", "random:11"}, 1},
    {"f32-nan", {"eager"}},
};
constexpr const char *kFile = "compressor/backward/backward_cuda.cu",
                     *kShared = "compressor/backward/backward_cuda.cuh",
                     *kLarge = "compressor/backward/backward_large_cuda.cuh";
const BugsOf warps{kFile, "bf16-csa"}, block{kFile, "f32-norm"},
    groups{kFile, "f32-ratio31-overlap"}, rows{kFile, "f16-keys"},
    turns{kFile, "bf16-many-windows", 1};
const BugsOf large{kLarge, "bf16-hca"};
const BugsOf course{kShared, "bf16-many-windows", 1};
constexpr const char* kStageWaited = "device::cp_async_wait<kStages - 1>();";
constexpr const char* kHandedOver = "// the gradients are there, the slots of the next window";
constexpr const char* kSumsOfWarp = "&sums[warp][lane * kColumns]) = sum;";
constexpr const char* kOfNorm = "params.d_norm_weight[result - biases] = total;";
constexpr const char* kOfBias = "(p.series - 1) * p.d) + column] = total;";
constexpr const char* kRstd = "shared.rstd[turn % kLargeWindows] = params.rstd[row];";
constexpr const char* kProducts = "if (lane == 0) shared.products[turn % 2][warp] = sum;";
constexpr const char* kNormWeight = "shared.norm_weight[own_column - begin] =";
constexpr const char* kNorms = "if (lane == 0) params.norms[row] = {rstd,";
constexpr const char* kWindows = "windows_kernel(const __grid_constant__ KernelParams params) {";
constexpr const char* kBiasSums =
    "shared.sums[j][own_thread] = Pack<float>::of(bias_sums[j]).words;";
constexpr const char* kPrepareNorms = "prepare_norms(const __grid_constant__";
constexpr const char* kAddParts = "add_parts(const __grid_constant__";
const std::vector<PlantedBug> kQuickBugs = {
    warps("StageBeforeItIsThere", kStageWaited, drop),
    large("LargeSlotsAndGradientsBeforeTheyAreThere", kHandedOver, drop),
    large("FirstLargeSlotsBeforeTheyAreThere", "// the slots of the first window are there", drop),
    course("WindowsBeforeTheyAreThere", "// the windows are there", drop),
    in_one_schedule(
        block("PartsBeforeTheyAreWritten", "device::wait_for_kernel_before();  // with", drop)),
    in_one_schedule(
        block("NormsBeforeTheyAreWritten", "device::wait_for_kernel_before();  // of", drop)),
};
const std::vector<PlantedBug> kThoroughBugs = {
    large("LargeCopiesNotWaitedFor", kHandedOver, drop, 0, -1),
    large("FirstLargeCopiesNotWaitedFor", "// the slots of the first window are there", drop, 0,
          -1),
    in_one_schedule(
        large("ColumnOfTheNextLane", "x[c] = __shfl_sync(device::kFullWarp, own,", add, 1)),
    course("WindowsWrittenWhileTheyAreRead", "// the windows have been read", drop),
    large.undo("LargeRstdNotFound", kRstd),
    large.move("LargeRstdOfTheNextWindow", kRstd, 4),
    large.undo("ProductsNotStored", kProducts),
    large.move("ProductsOfTheNextWarp", kProducts, 4),
    large.undo("NormWeightsNotStored", kNormWeight),
    large.move("NormWeightsOfTheNextColumn", kNormWeight, 4),
    block.undo("NormsNotStored", kNorms),
    block.move("NormsOfTheNextRow", kNorms, 8),
    in_one_schedule(block("RstdOfTheNextRow", "const float rstd = params.rstd[row];", misread, 4)),
    block("NormsOfTheNextBlock", kPrepareNorms, shift_block, 1),
    block("NormsOfTheNextWarp", kPrepareNorms, shift_thread, 32),
    block("NormsOfTheNextLane", kPrepareNorms, shift_thread, 1),
    in_one_schedule(block("NormsWithoutABlock", kPrepareNorms, launch_blocks, -1)),
    in_one_schedule(block("NormsWithoutAWarp", kPrepareNorms, launch_threads, -32)),
    in_one_schedule(block("NormsAside", kPrepareNorms, launch_astray)),
    warps("StageOfTheNeighbourBeforeItIsThere", kStageWaited, drop, 0, 1),
    turns("StageWrittenWhileItIsRead", "// the stage has been read", drop),
    warps("SumsOfWindowsBeforeTheyAreThere", "// the sums of all windows are there", drop),
    warps("SumsWhereAStageIsRead", "// all stages have been read", drop),
    in_one_schedule(rows("TransformOfTheNextLane", "const float other = __shfl_xor_sync(", add, 1)),
    in_one_schedule(groups("GroupsOfTheNextLane", "x[c] = op(x[c], __shfl_xor_sync(", add, 1)),
    in_one_schedule(warps("WindowsThreadsOneFurther", kWindows, shift_thread, 1)),
    race(in_one_schedule(warps("WindowsBlocksOneFurther", kWindows, shift_block, 1))),
    in_one_schedule(warps("WindowsWithoutABlock", kWindows, launch_blocks, -1)),
    in_one_schedule(warps("WindowsWithoutAWarp", kWindows, launch_threads, -32)),
    race(in_one_schedule(warps("WindowsAside", kWindows, launch_astray))),
    warps.undo("BiasSumsNotStored", kBiasSums),
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
