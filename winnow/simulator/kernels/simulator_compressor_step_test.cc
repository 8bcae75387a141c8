// compressor::step of CUDA in the simulator.
#include "winnow/simulator/testing/simulate.h"

namespace winnow::compressor {

testing::Operation step_operation();

namespace {

using simulator::beyond_a_pair;
using simulator::BugsOf;
using simulator::in_one_schedule;
using simulator::PassingCase;
using simulator::PlantedBug;
using enum simulator::Plant::Action;

const std::vector<PassingCase> kQuickCases = {
    {"f32-overlap-undone", {"eager"}},    {"bf16-fp8_584-csa", {"random:1"}},
    {"f16-pages-left-out", {"random:2"}}, {"f32-bf16-i32-slots", {"random:3"}},
    {"bf16-pages-power-64", {"eager"}},   {"bf16-pages-hca", {"random:4"}, 8},  // clusters of eight
};
const std::vector<PassingCase> kThoroughCases = {
    {"bf16-fp8_584-hca", {"random:4", "late"}, 8},
    {"bf16-pages-hca", {"late", "starved:5"}, 8},
    {"f32-fp8_584-gaps", {"random:5"}},
    {"f16-fp8_584-block3", {"eager"}},
    {"f32-pages-wide", {"random:6"}},
    {"bf16-long-steps", {"random:7"}},
};
const BugsOf lists{"step_cuda.cu", "f32-overlap-undone"}, slots{"step_cuda.cu", "bf16-fp8_584-csa"};
const BugsOf hca{"step_cuda.cu", "bf16-fp8_584-hca", 8};
const BugsOf pages{"step_cuda.cu", "bf16-pages-hca", 8}, cache{"write_row.cuh", "bf16-fp8_584-csa"},
    windows{"window_cuda.cuh", "f32-overlap-undone"},
    groups{"window_cuda.cuh", "bf16-pages-hca", 8};
constexpr const char* kKeys = "*reinterpret_cast<cache::Share<std::uint8_t, kColumns>*>(place.row";
constexpr const char* kLargest = "largest = max(largest, __shfl_xor_sync(";
constexpr const char* kF8 = "*reinterpret_cast<Share<std::uint8_t, 2 * kCount>*>(row + column) =";
constexpr const char* kFloats = "*reinterpret_cast<float4*>(to) = words;";
const std::vector<PlantedBug> kQuickBugs = {
    lists("ListsBeforeTheyAreRead", "// what the block does hangs on one reading", drop),
    slots("SlotBeforeItIsRead", "slots[thread.window] = slot;", drop, 0, 1),
    slots("StageBeforeItIsThere", "device::cp_async_wait<0>();", drop),
    in_one_schedule(
        slots("StepBeforeTheOneBeforeHasEnded", "device::wait_for_kernel_before();", drop)),
    in_one_schedule(beyond_a_pair(pages("RowsForTwoBlocks", "device::st_shared_cluster(", drop))),
    pages("NoBarrierBeforeOneSends", "// all blocks run before one sends", drop),
};
const std::vector<PlantedBug> kThoroughBugs = {
    {"StateWrittenBeforeItIsRead",
     "f32-overlap-one-undone",
     {"step_cuda.cu", "// the state has been read", drop},
     {"starved:0"}},
    slots("StageOfTheNeighbourBeforeItIsThere", "// the copies of the warp are there", drop),
    hca("StageWrittenWhileItIsRead", "const auto copy = [&](int round) {", drop, 0, 1),
    hca("RoundBeforeItIsThere", "// the round is there", drop),
    hca("OtherRoundsThanThat", "device::cp_async_wait<kRoundsAhead>();", drop),
    hca("SumsOfGroupsBeforeTheyAreThere", "// the sums of all groups are there", drop),
    hca("RowsOfBlocksBeforeTheyAreThere", "// the rows of all blocks are there", drop),
    hca("RoundsBeforeTheyAreThere", "device::cp_async_wait<kMostStages - 1>();", drop),
    slots.undo("SlotNotKept", "if (leads) slots[thread.window] = slot;"),
    slots.move("SlotOfTheNextWindow", "if (leads) slots[thread.window] = slot;", 8),
    pages.undo("KeysNotStored", kKeys),
    pages.move("KeysOfTheNextLane", kKeys, 4),
    pages.undo("ScalesNotStored", "if (column == 0) *place.scale = scale;"),
    pages.move("ScalesOfTheNextPlace", "if (column == 0) *place.scale = scale;", 4),
    cache("LargestOfTheLane", kLargest, drop),
    cache("LargestOfTheNextLane", kLargest, add, 1),
    cache.undo("F8NotStored", kF8),
    cache.move("F8OfTheNextLane", kF8, 4),
    cache.undo("CacheScalesNotStored", "scales[column / Row::kGroup] = sparse_mla::"),
    groups("SumsBeforeTheyAreThere", "exchange.sums[threadIdx.x] = sums;", drop, 0, 1),
    groups.undo("SumsNotExchanged", "exchange.sums[threadIdx.x] = sums;"),
    windows.undo("StateAndRowsNotStored", kFloats),
    windows.move("StateAndRowsOfTheNextThread", kFloats, 16),
};
WINNOW_SIMULATOR_TESTS(SimulatorCompressorStep, step_operation(), kQuickCases, kThoroughCases,
                       kQuickBugs, kThoroughBugs);

}  // namespace
}  // namespace winnow::compressor
