// indexer::backward of every GPU in the simulator.
#include "winnow/simulator/indexer_simulation.h"

namespace winnow::indexer {

testing::Operation backward_operation();

namespace {

const bool kSet = simulate_any_gpu();

const std::vector<PassingCase> kQuickCases = {
    {"bf16-h64", {"eager", "late", "random:1", "starved:3"}},
    {"bf16-h96-deterministic", {"late", "random:2"}},
    {"f16-h64", {"late"}},
    {"f16-h64-tiny", {"random:2"}},
    {"f16-h64-huge", {"late"}},
    {"f16-d64-h16-dense-all-options", {"random:1"}},
    {"bf16-h16-dense-all-options", {"late"}},
    {"bf16-all-rules-as-q", {"random:1"}},
    {"bf16-infinite", {"late"}},
    {"bf16-k512", {"random:4"}},
    {"bf16-sq3-k0", {"late"}},
    {"f8_e4m3-h64", {"late", "random:5"}},
    {"f8_e4m3-d64-h16-dense-all-options", {"random:6"}},
};
const std::vector<PassingCase> kThoroughCases =
    all_cases(backward_operation(), {"sq70001", "sk20000", "sk9000", "sq1200"});

const BugsOf bug{"indexer/backward/backward_cuda.cuh", "bf16-k512"},
    f16{"indexer/backward/backward_cuda.cuh", "f16-h64"};
const BugsOf rows{"copy_rows_cuda.cuh", "bf16-k512"}, f8{"copy_rows_cuda.cuh", "f8_e4m3-k512"};

const BugsOf fixed{"indexer/backward/backward_cuda.cuh", "bf16-h96-deterministic"},
    bounds{"backward_sums.cuh", "bf16-h96-deterministic"},
    several{"backward_sums.cuh", "bf16-all-rules-deterministic", 1},  // queries of a block
    one{"backward_sums.cuh", "bf16-h96-deterministic", 1},            // multiprocessor
    plain{"backward_sums.cuh", "bf16-all-rules-as-q"};
// Of the kernels before and after the products.
constexpr const char* kBound = "bound_kernel(const __grid_constant__";
constexpr const char* kScale = "scale_kernel(const __grid_constant__";
constexpr const char* kFinish = "finish_kernel(const __grid_constant__";
constexpr const char* kLargest = "atomicMax(&largest, __float_as_uint(sum)";
constexpr const char* kScales = "p.scales[row] = scale;";
// What it stores: f32 and bf16.
constexpr const char* kWide = "make_float4(v[0], v[1], v[2], v[3]);";
constexpr const char* kPacked = "make_uint2(pack_pair<kNarrow>(v[0], v[1])";

const std::vector<PlantedBug> kQuickBugs = {
    race(rows("NoWaitForRows", "cp_async_wait<0>();", drop)),
    race(bug("NoBarrierBehindDDot", "d_dot of all warps is there", drop)),
    in_one_schedule(race(bug("PlainSumsOfDk", "reduce_add(p.dk", weaken))),
    in_one_schedule(race(fixed("FixedPlainSums", "reduce_add(p.fixed", weaken))),
    in_one_schedule(race(bounds("PlainBounds", "atomicMax(p.bounds + row", weaken))),
};
const std::vector<PlantedBug> kThoroughBugs = {
    race(bug("NoBarrierBehindTiles", "the tile is there, and the one before", drop)),
    race(bug("NoBarrierBehindSums", "the sums of dk are done with", drop)),
    race(bug("NoBarrierBehindDq", "dq of the other entries is there", drop)),
    race(bug("NoSyncOfSums", "// the warp's sums are there", drop)),
    race(f16("NoBarrierOfTheLargest", "the largest of all warps", drop)),
    race(rows("NoCommit", "cp_async_commit();", drop)),
    rows("RowsElsewhere", "cp_async_zfill<128>(slot.unit(local", add, 16),
    f8("WidenedRowsElsewhere", "st_shared(slot.unit(local", add, 16),
    f8("LateRows", "st_shared(slot.unit(local", delay),
    bug("DDotElsewhere", "st_shared(shared.d_dot().pair", add, 4),
    bug("NoDDot", "st_shared(shared.d_dot().pair", drop),
    bug("OtherKeys", "ldmatrix_x4(rows.at(2 * own_half + n16", add, 16),
    bug("OtherRows", "ldmatrix_x4_trans(rows.at(2 * own_half + k16", add, 16),
    bug("OtherHeads", "ldmatrix_x4_trans(d_dot_squares", add, 16),
    bug("NoProductsOfDq", "mma_m16n8k16<kType>(dq[2 * n16 + 1]", drop),
    bug("NoTargets", "shared.targets()[slot][local].store", drop),
    bug("LateScores", "shared.d_scores()[slot][local].store", delay),
    bug("NoAdditions", "reduce_add(p.dk", drop),
    // bound_kernel
    race(bounds("LargestBeforeTheSums", "sums[threadIdx.x] = sum;", drop, 0, 1)),
    race(bounds("LargestBeforeItIsThere", kLargest, drop, 0, 2)),
    race(several("SumsOfTheNextQueryTooEarly", "atomicMax(p.bounds + row", drop, 0, 2)),
    bounds.undo("LargestNotCleared", "if (threadIdx.x == 0) largest = 0;"),
    in_one_schedule(bounds("NoLargest", kLargest, drop)),
    race(bounds("LargestByPlainStores", kLargest, weaken)),
    in_one_schedule(bounds("NoBounds", "atomicMax(p.bounds + row", drop)),
    bounds.undo("SumsOfPartsNotStored", "sums[threadIdx.x] = sum;"),
    in_one_schedule(bounds("BoundQueriesOneFurther", kBound, shift_block, 1)),
    race(bounds("BoundAside", kBound, launch_astray)),
    // scale_kernel
    bounds.undo("ScalesNotStored", kScales),
    bounds.move("ScalesOfTheNextRow", kScales, 4),
    of_threads(0, 1, bounds.undo("ScaleOfTheFirstRowNotStored", kScales)),
    of_threads(32, 64, bounds.undo("ScalesOfOneWarpNotStored", kScales)),
    in_one_schedule(bounds("ScalesByTheNextBound", "__uint_as_float(p.bounds[row]);", misread, 4)),
    in_one_schedule(
        bounds("ScalesByTheBoundBefore", "__uint_as_float(p.bounds[row]);", misread, -4)),
    in_one_schedule(bounds("ScaleThreadsOneFurther", kScale, shift_thread, 1)),
    in_one_schedule(bounds("ScaleRowsOneBlockFurther", kScale, shift_block, 1)),
    in_one_schedule(bounds("ScaleOfOneBlockLess", kScale, launch_blocks, -1)),
    race(bounds("ScaleAside", kScale, launch_astray)),
    // finish_kernel
    in_one_schedule(plain("PlainSumsOfTheNextQuad", "const float4 sums = __ldcs(", add, 16)),
    in_one_schedule(bounds("UnitsOfTheNextRow", "unit = 1.0f / p.scales[row];", misread, 4)),
    in_one_schedule(bounds("FixedSumsOfTheNextColumn", "static_cast<long long>(", misread, 8)),
    in_one_schedule(bounds("FinishThreadsOneFurther", kFinish, shift_thread, 1)),
    in_one_schedule(bounds("FinishBlocksOneFurther", kFinish, shift_block, 1)),
    in_one_schedule(one("FinishRowsTooFarApart", kFinish, shift_grid, 1)),
    in_one_schedule(bounds("FinishOfOneWarpLess", kFinish, launch_threads, -32)),
    race(bounds("FinishAside", kFinish, launch_astray)),
    bounds.undo("DkNotStored", kWide),
    bounds.move("DkOfTheNextQuad", kWide, 16),
    of_threads(224, 256, bounds.undo("DkOfTheLastWarpNotStored", kWide)),
    plain.undo("NarrowDkNotStored", kPacked),
    plain.move("NarrowDkOfTheNextQuad", kPacked, 8),
    of_threads(0, 1, plain.undo("NarrowDkOfTheFirstThreadNotStored", kPacked)),
};

WINNOW_SIMULATOR_TESTS(SimulatorIndexerBackwardCuda, backward_operation(), kQuickCases,
                       kThoroughCases, kQuickBugs, kThoroughBugs);

}  // namespace
}  // namespace winnow::indexer
