// indexer::topk_paged of every GPU in the simulator.
#include "winnow/simulator/indexer_simulation.h"

namespace winnow::indexer {

testing::Operation topk_paged_operation();

namespace {

const bool kSet = simulate_any_gpu();

const std::vector<PassingCase> kQuickCases = {
    {"h64", {"late", "random:1", "starved:3"}},
    {"d64", {"random:2"}},
    {"sq9", {"random:3"}},
    {"lengths-out-of-range", {"random:4"}},
    {"absent", {"late"}},
    {"nan-larger", {"random:6"}},
    {"reversed", {"random:7"}},
    {"no-page", {"eager"}},
    {"long-h64-sq2", {"late"}},
    {"h64-plateau", {"late"}},
    {"lengths-of-queries-h64", {"late"}},
    {"lengths-of-queries-out-of-range", {"random:11"}},
};
const std::vector<PassingCase> kThoroughCases = all_cases(topk_paged_operation(), {});

const BugsOf few{"score_tiles_cuda.cuh", "h64"}, few_rows{"copy_rows_cuda.cuh", "h64"};
const BugsOf rows{"copy_rows_cuda.cuh", "long"};
const BugsOf tiles{"score_tiles_cuda.cuh", "long"}, choice{"choose.cuh", "batches"};
const BugsOf kernel{"indexer/topk_paged/topk_paged_cuda.cuh", "h64"};
constexpr const char* kKeys = "make_uint4(key[0], key[1], key[2], key[3]);";
constexpr const char* kPaged = "paged_kernel(const __grid_constant__";

const std::vector<PlantedBug> kQuickBugs = {
    race(few("NoBarrierBehindTheLastSums", "the last sums are there", drop)),
    few_rows("NoRows", "st_shared(slot.unit(local", drop),
    race(BugsOf{"choose.cuh", "h64-plateau"}("BinsByPlainStores",
                                             "atomicAdd(bins + (distance >> shift), 1u);", weaken)),
};
const std::vector<PlantedBug> kThoroughBugs = {
    race(tiles("NoBarrierBehindTiles", "the tile is there, and the sums of", drop)),
    rows("RowsElsewhere", "st_shared(slot.unit(local", add, 16),
    choice("NoBarrierOfChosen", "shared_.equal_of_warp[warp()] = own_equal;", drop, 0, 2),
    rows("LateRows", "st_shared(slot.unit(local", delay),
    tiles("OtherKeys", "ldmatrix_x4(rows.at(m", add, 16),
    tiles("NoProducts", "mma_m16n8k16<kProductType", drop),
    tiles("SumsElsewhere", "to[unit * kUnitRows", add, 4),
    tiles("NoSums", "to[unit * kUnitRows", drop),
    kernel("PageOfTheNextPlace", "const int page = __ldg(table_ + place);", add, 4),
    in_one_schedule(kernel("PagedScalesOfTheNextRows", "scale = __ldg(", add, 16)),
    kernel.undo("PagedKeysNotStored", kKeys),
    kernel.move("PagedKeysOfTheNextLane", kKeys, 16),
    of_threads(0, 1, kernel.undo("PagedKeysOfALaneNotStored", kKeys)),
    in_one_schedule(kernel("PagedThreadsOneFurther", kPaged, shift_thread, 1)),
    in_one_schedule(kernel("PagedBlocksOneFurther", kPaged, shift_block, 1)),
    in_one_schedule(kernel("PagedWithoutABlock", kPaged, launch_blocks, -1)),
    in_one_schedule(kernel("PagedWithoutAWarp", kPaged, launch_threads, -32)),
    race(in_one_schedule(kernel("PagedAside", kPaged, launch_astray))),
    choice("NoBarrierOfEmptyBins", "int round = 0;", drop, 0, 2),
    choice("NoBarrierOfCountedBins", "static void sync() {", drop, 0, 4),
};

WINNOW_SIMULATOR_TESTS(SimulatorTopkPagedCuda, topk_paged_operation(), kQuickCases, kThoroughCases,
                       kQuickBugs, kThoroughBugs);

}  // namespace
}  // namespace winnow::indexer
