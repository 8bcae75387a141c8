// compressor::forward of CUDA in the simulator.
#include "winnow/simulator/testing/simulate.h"

namespace winnow::compressor {

testing::Operation forward_operation();

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
    {"bf16-ratio7-overlap", {"eager"}},
};
const std::vector<PassingCase> kThoroughCases = {
    {"bf16-hca", {"random:4"}},
    {"f32-strided", {"random:5"}},
    {"f16-d512-overlap", {"eager"}},
    {"f32-nan", {"eager"}},
};
const BugsOf groups{"window_cuda.cuh", "bf16-ratio7-overlap"}, lanes{"window_cuda.cuh", "bf16-hca"},
    keys{"window_cuda.cuh", "f16-keys"}, copies{"compressor/forward/forward_cuda.cu", "bf16-csa"},
    rows{"window_cuda.cuh", "bf16-csa"}, large{"compressor/forward/forward_cuda.cu", "bf16-hca"};
constexpr const char* kForward = "forward_kernel(const __grid_constant__ KernelParams params) {";
constexpr const char* kSmall = "small_windows_kernel(const __grid_constant__";
constexpr const char* kRstd = "if (params.rstd != nullptr) params.rstd[row] =";
constexpr const char* kSquares = "exchange.squares[threadIdx.x] = x;";
constexpr const char* kStored = "*reinterpret_cast<uint2*>(to) = words;";
const std::vector<PlantedBug> kQuickBugs = {
    groups("SumsBeforeTheyAreThere", "exchange.sums[threadIdx.x] = sums;", drop, 0, 1),
    copies("PartBeforeItIsThere", "device::cp_async_wait<kParts - 1>();", drop),
    copies("PartOfTheNeighbourBeforeItIsThere", "device::cp_async_wait<kParts - 1>();", drop, 0, 1),
};
const std::vector<PlantedBug> kThoroughBugs = {
    lanes("SquaresBeforeTheyAreThere", kSquares, drop, 0, 1),
    copies("PartWrittenWhileRead", "void copy(Part<T>& part) {", drop, 0, 1),
    copies("OneGroupTooMany", "device::cp_async_wait<kParts - 1>();", add, 1),
    keys("ColumnsBeforeTheyAreThere", "for (int half = 1; half < p.d; half *= 2) {", drop, 0, 1),
    copies("PartsNotCopied", "device::cp_async(device::shared_address(&to), from);", drop),
    rows("SquaresOfTheLane", "x += __shfl_xor_sync(", drop),
    rows("SquaresOfTheNextLane", "x += __shfl_xor_sync(", add, 1),
    rows.undo("RowsNotStored", kStored),
    rows.move("RowsOfTheNextThread", kStored, 8),
    lanes.undo("SquaresNotStored", kSquares),
    lanes.move("SquaresOfTheThreadBehind", kSquares, 4),
    lanes.undo("LargeRowsNotStored", kStored),
    lanes.move("LargeRowsOfTheNextThread", kStored, 8),
    in_one_schedule(large("LargeRowsOfTheNextBlock", kForward, shift_block, 1)),
    in_one_schedule(large("LargeRowsOfTheNextLane", kForward, shift_thread, 1)),
    in_one_schedule(large("LargeRowsWithoutABlock", kForward, launch_blocks, -1)),
    in_one_schedule(large("LargeRowsWithoutAWarp", kForward, launch_threads, -32)),
    in_one_schedule(large("LargeRowsOfTheNextWarp", kForward, shift_thread, 32)),
    in_one_schedule(large("LargeRowsOfTheLaneBefore", kForward, shift_thread, -1)),
    in_one_schedule(large("LargeRowsOfTheBlockBefore", kForward, shift_block, -1)),
    large.undo("LargeRstdNotStored", kRstd),
    large.move("LargeRstdOfTheNextRow", kRstd, 4),
    large.move("LargeRstdOfTheRowBefore", kRstd, -4),
    in_one_schedule(copies("SmallThreadsOneFurther", kSmall, shift_thread, 1)),
    in_one_schedule(copies("SmallBlocksOneFurther", kSmall, shift_block, 1)),
    in_one_schedule(copies("SmallWithoutAWarp", kSmall, launch_threads, -32)),
    race(copies("PartsOfNoGroup", "device::cp_async_commit();", drop)),
    race(copies("PartsElsewhere", "device::cp_async(device::shared_address(&to), from);", add, 16)),
    keys("ColumnsReadBeforeTheyAreThere", "high = a - b;", drop, 0, 3),
};
WINNOW_SIMULATOR_TESTS(SimulatorCompressorForward, forward_operation(), kQuickCases, kThoroughCases,
                       kQuickBugs, kThoroughBugs);

}  // namespace
}  // namespace winnow::compressor
