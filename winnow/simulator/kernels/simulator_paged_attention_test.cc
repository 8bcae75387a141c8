// paged_xl::attention of CUDA in the simulator: kernels for a batch, and for a sequence alone.
#include "winnow/simulator/testing/simulate.h"

namespace winnow::paged_xl {

testing::Operation attention_operation();

namespace {

using simulator::BugsOf;
using simulator::of_argument;
using simulator::PassingCase;
using simulator::PlantedBug;
using simulator::schedules;
using enum simulator::Plant::Action;

const std::vector<PassingCase> kQuickCases = {
    {"f32-plain-d32", {"eager", "random:1"}},
    {"bf16-plain-b32", schedules(1, {3})},  // parts of three tiles and more, put together
    {"bf16-fused-b8", {"random:2", "starved:1"}},
    {"f16-fused-d80", {"random:3"}},
    {"bf16-fused-d192", {"late"}},
    {"f32-plain-h16-kv2", {"random:4"}},  // two passes over the query heads of a cached head
    {"bf16-fused-h8-kv8", {"eager"}},
    {"f32-fused-wide", {"random:5"}},
    {"f16-plain-bd-f16", {"eager"}},
    {"bf16-plain-mask-some", {"random:6"}},
    {"bf16-plain-no-context", {"eager"}},
    {"bf16-plain-alone", {"eager", "random:1"}},
    {"f32-fused-alone-d256", {"late"}},
};
const std::vector<PassingCase> kThoroughCases = {
    {"f32-fused-d64", {"random:8"}},
    {"f16-plain-d128", {"random:8"}},
    {"bf16-plain-d256", {"late"}},
    {"f32-fused-d160", {"random:9"}},
    {"bf16-fused-h6-kv3", schedules(2, {0, 7})},
    {"bf16-plain-h8-kv1", schedules(2, {0, 7})},
    {"f32-fused-h16-kv2", {"random:9"}},
    {"bf16-fused-no-context", {"eager"}},
    {"f32-plain-no-sequence", {"eager"}},
    {"f32-fused-one-token", {"random:10"}},
    {"bf16-plain-splits", schedules(2, {0, 7})},
    {"f32-fused-splits", {"random:10"}},
    {"f32-fused-s70", {"random:7"}},
    {"bf16-fused-shared-blocks", {"random:11"}},
    {"f32-plain-nothing-spare", {"eager"}},
    {"f16-fused-wide", {"late"}},
    {"bf16-plain-reversed", {"random:11"}},
    {"bf16-fused-bias-per-seq", {"random:12"}},
    {"bf16-plain-bd-bf16", {"random:12"}},
    {"f32-plain-mask-all", {"eager"}},
    {"bf16-fused-large-logits", {"random:13"}},
    {"f32-plain-alone", schedules(2, {0, 7})},
    {"bf16-fused-alone", schedules(2, {0, 7})},
    {"bf16-plain-alone-d256", schedules(2, {0, 7})},
};

// Contexts of 131 and 128 tokens among others, in several parts, of which a warp has several.
constexpr const char *kBatch = "bf16-fused-b8", *kKernels = "paged_xl/attention/attention_cuda.cuh";
const BugsOf batch{kKernels, kBatch}, walk{"split_cuda.cuh", kBatch}, tile{"tile_cuda.cuh", kBatch},
    sums{"warp.cuh", kBatch};
// The kernels for one sequence alone; and those for a batch that share lines with them.
constexpr const char* kAlone = "bf16-fused-alone";
const BugsOf alone{"one_sequence_cuda.cuh", kAlone}, alone_too{kKernels, kAlone},
    alone_tile{"tile_cuda.cuh", kAlone}, alone_sums{"warp.cuh", kAlone};

constexpr const char* kMerge = "merge_kernel(const __grid_constant__";
constexpr const char* kAloneKernel = "one_sequence_kernel(const __grid_constant__";
constexpr const char* kMergeBlocks = "merge_blocks_kernel(const __grid_constant__";

PlantedBug of_warp(unsigned warp, PlantedBug bug) {
  bug.plant.first_thread = 32 * warp;
  bug.plant.end_thread = 32 * warp + 32;
  return bug;
}

const std::vector<PlantedBug> kQuickBugs = {
    race(batch("QueriesReadTooEarly", "row_of<T>(p.pos_bias_v, sequence, first_head + h)", drop, 0,
               3)),
    race(alone("PartsReadBeforeTheyAreThere", "weights[w][h] = warp.weights[h];", drop, 0, 3)),
    in_one_schedule(
        race(batch("PartsTakenByPlainStores", "index = atomicAdd(&taken, 1);", weaken))),
    in_one_schedule(batch("MergeBeforeTheParts", "device::wait_for_kernel_before();", drop)),
    in_one_schedule(alone("MergeAloneBeforeTheParts", "device::wait_for_kernel_before();", drop)),
};
const std::vector<PlantedBug> kThoroughBugs = {
    // attention_kernel
    batch("CounterBeforeItIsThere", "if (threadIdx.x == 0) taken = 0;", drop, 0, 1),
    saying("deadlock: ",
           batch("BarrierOfTooManyThreads", "if (threadIdx.x == 0) taken = 0;", add, 32, 1)),
    race(walk("WalkSavedTooEarly", "__device__ ~Walk() {", drop, 0, 1)),
    race(walk("WalkReadTooEarly", "__device__ ~Walk() {", drop, 0, 3)),
    batch("PartsLeftOut", "index = atomicAdd(&taken, 1);", add, 1),
    batch("PartOfTheLane", "index = __shfl_sync(device::kFullWarp, index, 0);", drop),
    batch("ValuesOfTheOtherHalf", "const int block = __shfl_sync(device::kFullWarp, key_block", add,
          8),
    batch("ProductsOfTheLane", "dots[h] += __shfl_xor_sync(", drop),
    batch("MaximumOfTheLane", "largest = fmaxf(largest, __shfl_xor_sync(", drop),
    batch("WeightsOfTheNextToken", "of_half[h][i] = __shfl_sync(", add, 1),
    batch("ValuesOfHalfTheTokens", "sums[h][k] += __shfl_xor_sync(", drop),
    batch("WeightsOfOneToken", "weights[h] += __shfl_xor_sync(", drop),
    walk("PartOfTheLanesPlace", "__ffs(static_cast<int>(__ballot_sync(", drop),
    walk("LongestOfTheLane", "work.longest = __reduce_max_sync(", drop),
    tile("RowsOfTheNextDistance", "return __shfl_sync(device::kFullWarp, sums[0], source);", add,
         2),
    tile("LengthsOfTheNextSequence", "return min(max(__ldg(data + s), 0), limit);", add, 4),
    // merge_kernel
    race(batch("SumsBeforeTheyAreThere", "shared_sums[warp][lane + k * kWarpSize] =", drop, 0, 1)),
    saying("deadlock: ",
           batch("MergeOfTooManyThreads", "shared_sums[warp][lane + k * kWarpSize] =", add, 32, 1)),
    saying("named barrier: ",
           batch("MergeOfTooFewThreads", "shared_sums[warp][lane + k * kWarpSize] =", add, -1, 1)),
    of_warp(0, batch("MergeWithoutTheFirstWarp", "shared_sums[warp][lane + k * kWarpSize] =", drop,
                     0, 1)),
    in_one_schedule(batch("MergeThreadsOneFurther", kMerge, shift_thread, 1)),
    in_one_schedule(batch("MergeHeadsOneFurther", kMerge, shift_block, 1)),
    in_one_schedule(batch("MergeOfOneHeadLess", kMerge, launch_blocks, -1)),
    in_one_schedule(batch("MergeOfOneWarpLess", kMerge, launch_threads, -32)),
    race(in_one_schedule(batch("MergeAside", kMerge, launch_astray))),
    batch("MaximumOfOwnPart", "maximum = fmaxf(maximum, __shfl_xor_sync(", drop),
    batch("MaximumOfTheNextPart", "maximum = fmaxf(maximum, __shfl_xor_sync(", add, 1),
    batch("SharesOfTheNextPart", "return __shfl_sync(device::kFullWarp, share, part);", add, 1),
    batch("SharesOfTheLane", "return __shfl_sync(device::kFullWarp, share, part);", drop),
    sums("SumOfTheLane", "  x += __shfl_xor_sync(kFullWarp, x, distance);", drop),
    sums("SumOfTheWrongLanes", "  x += __shfl_xor_sync(kFullWarp, x, distance);", add, 1),
    // one_sequence_kernel
    race(alone("SumsStoredOverQueries", "warp.run(first, tiles_of<T>(warp.length), step);", drop, 0,
               2)),
    saying("deadlock: ",
           alone("AloneOfTooManyThreads", "__syncthreads();  // keeps all of this", add, 32)),
    saying("deadlock: ",
           alone("PartsOfTooManyThreads", "weights[w][h] = warp.weights[h];", add, 32, 3)),
    of_warp(3, alone("PartsWithoutAWarp", "weights[w][h] = warp.weights[h];", drop, 0, 3)),
    in_one_schedule(alone("AloneThreadsOneFurther", kAloneKernel, shift_thread, 1)),
    in_one_schedule(alone("AloneTilesOneFurther", kAloneKernel, shift_block, 1)),
    in_one_schedule(alone("AloneStridesTooLong", kAloneKernel, shift_grid, 1)),
    in_one_schedule(alone("AloneWithoutABlock", kAloneKernel, launch_blocks, -1)),
    in_one_schedule(alone("AloneWithoutAWarp", kAloneKernel, launch_threads, -32)),
    alone.undo("AloneSumsNotStored", "if (warp.half == 0) sums[w]"),
    alone.undo("AloneMaximaNotStored", "maxima[w][h] = warp.maxima[h];"),
    alone.undo("AloneWeightsNotStored", "weights[w][h] = warp.weights[h];"),
    race(alone_too("AloneQueriesReadTooEarly", "row_of<T>(p.pos_bias_v, sequence, first_head + h)",
                   drop, 0, 3)),
    alone_too("AloneBlockOfTheNextToken", "block = device::load_now(table_entry(j));", add, 4),
    alone_too("AloneProductsOfTheLane", "dots[h] += __shfl_xor_sync(", drop),
    alone_too("AloneMaximumOfTheLane", "largest = fmaxf(largest, __shfl_xor_sync(", drop),
    alone_too("AloneWeightsOfTheNextToken", "of_half[h][i] = __shfl_sync(", add, 1),
    alone_too("AloneValuesOfHalfTheTokens", "sums[h][k] += __shfl_xor_sync(", drop),
    alone_too("AloneWeightsOfOneToken", "weights[h] += __shfl_xor_sync(", drop),
    alone_tile("AloneRowsOfTheNextDistance",
               "return __shfl_sync(device::kFullWarp, sums[0], source);", add, 2),
    // merge_blocks_kernel
    saying("deadlock: ",
           alone("LoadsOfTooManyThreads", "__syncthreads();  // keeps the loads", add, 32)),
    saying("named barrier: ",
           alone("LoadsOfTooFewThreads", "__syncthreads();  // keeps the loads", add, -1)),
    in_one_schedule(alone("MergeBlocksThreadsOneFurther", kMergeBlocks, shift_thread, 1)),
    in_one_schedule(alone("MergeBlocksOfTheNextHead", kMergeBlocks, shift_block, 1)),
    in_one_schedule(alone("MergeBlocksOfOneHeadLess", kMergeBlocks, launch_blocks, -1)),
    race(in_one_schedule(alone("MergeBlocksAside", kMergeBlocks, launch_astray))),
    in_one_schedule(
        of_argument(1, alone("MergeBlocksOfOneLess", kMergeBlocks, launch_argument, -1))),
    alone("MaximaElsewhere", "device::load_now(&records[lane].maximum_and_weights)", add, 8),
    alone("ValuesOfTheNextColumn", "device::load_now(&records[first + i].values[d])", add, 4),
    alone("ValuesBehindTheRecords", "device::load_now(&records[first + i].values[d])", add,
          1 << 20),
    alone_too("AloneMaximumOfOwnPart", "maximum = fmaxf(maximum, __shfl_xor_sync(", drop),
    alone_too("AloneMaximumOfTheNextPart", "maximum = fmaxf(maximum, __shfl_xor_sync(", add, 1),
    alone_too("AloneSharesOfTheNextPart", "return __shfl_sync(device::kFullWarp, share, part);",
              add, 1),
    alone_too("AloneSharesOfTheLane", "return __shfl_sync(device::kFullWarp, share, part);", drop),
    alone_sums("AloneSumOfTheLane", "  x += __shfl_xor_sync(kFullWarp, x, distance);", drop),
    alone_sums("AloneSumOfTheWrongLanes", "  x += __shfl_xor_sync(kFullWarp, x, distance);", add,
               1),
};
WINNOW_SIMULATOR_TESTS(SimulatorPagedAttention, attention_operation(), kQuickCases, kThoroughCases,
                       kQuickBugs, kThoroughBugs);

}  // namespace
}  // namespace winnow::paged_xl
