// expert_parallel::layout in the simulator.
#include "winnow/simulator/kernels/expert_parallel_simulation.h"

namespace winnow::expert_parallel {

testing::Operation layout_operation();

namespace {

using simulator::of_threads;
using simulator::PlantedBug;
using enum simulator::Plant::Action;

const std::vector<PassingCase> kQuickCases = {on_ranks("dropped", {"eager", "late", "random:1"}),
                                              on_ranks("nodes-of-3", {"random:2"}),
                                              on_ranks("wide", {"random:3"})};
const std::vector<PassingCase> kThoroughCases = all_on_ranks(layout_operation(), {});
const RankBugs layout{"layout_cuda.cu", "dropped"},
    blocks{"layout_cuda.cu", "more-experts-than-shared-memory-holds"};
constexpr const char* kClear = "clear_kernel(const __grid_constant__";
constexpr const char* kCount = "count_kernel(const __grid_constant__";
const std::vector<PlantedBug> kQuickBugs = {
    layout("LayoutCountsBeforeTheyAreCleared", "of_block[i] = 0;", drop, 0, 1),
    layout("LayoutInRankSetBeforeItIsCleared", "__syncwarp();", drop),
    layout("LayoutPairsCountedByPlainStores", "nullptr && count != 0) atomicAdd(", weaken),
};
const std::vector<PlantedBug> kThoroughBugs = {
    layout("LayoutPairsNotCounted", "if (counts != nullptr && count != 0) atomicAdd(", drop),
    layout("LayoutPairsCountedTwice", "if (counts != nullptr && count != 0) atomicAdd(", add, 1),
    layout("LayoutEveryLaneFirst", "return __ffs(__match_any_sync(", drop),
    layout("LayoutCountsOfTheBlockTooEarly", "if (!p.in_shared) return;", drop, 0, 1),
    layout("LayoutCountsNotCleared", "array[i] = 0;", undo),
    layout("LayoutCountsClearedOneFurther", "array[i] = 0;", move, 4),
    layout("LayoutCountsClearedOneBefore", "array[i] = 0;", move, -4),
    of_threads(0, 1, layout("LayoutFirstCountsNotCleared", "array[i] = 0;", undo)),
    of_threads(1, 32, layout("LayoutOtherCountsNotCleared", "array[i] = 0;", undo)),
    of_threads(255, 256, blocks("LayoutLastCountsOfBlocksNotCleared", "array[i] = 0;", undo)),
    layout("ClearThreadsOneFurther", kClear, shift_thread, 1),
    layout("ClearBlocksOneFurther", kClear, shift_block, 1),
    blocks("ClearLastBlockOneFurther", kClear, shift_block, 1),
    blocks("ClearStridesTooLong", kClear, shift_grid, 1),
    layout("CountThreadsOneFurther", kCount, shift_thread, 1),
    layout("CountBlocksOneFurther", kCount, shift_block, 1),
    layout("CountWithoutABlock", kCount, launch_blocks, -1),
    race(layout("CountAside", kCount, launch_astray)),
    layout("LayoutExpertOfTheNextPair", "expert = layout.expert_indices.data[", misread, 4),
    layout("LayoutCountOfTheNextExpert", "i += kThreads) add(to, i, from[i]);", misread, 4),
    layout("LayoutCountsOfTheBlockNotCleared", "i += kThreads) of_block[i] = 0;", undo),
    layout("LayoutInRankNotCleared", "r += p.lanes) in_rank[r] = 0;", undo),
    layout("LayoutInRankNotSet", "if (first_of_rank) in_rank[rank] = 1;", undo),
    layout("LayoutInRankOfTheNextRank", "if (first_of_rank) in_rank[rank] = 1;", move, 1),
};
WINNOW_SIMULATOR_TESTS(SimulatorLayout, with_room(layout_operation()), kQuickCases, kThoroughCases,
                       kQuickBugs, kThoroughBugs);

}  // namespace
}  // namespace winnow::expert_parallel
