// indexer::topk_paged of sm90 in the simulator.
#include "winnow/simulator/indexer_simulation.h"

namespace winnow::indexer {

testing::Operation topk_paged_operation();

namespace {

// Warps 0 to 11 multiply, 12 and 13 load pages, 14 heads.
const std::vector<PassingCase> kQuickCases = {
    {"h64", {"eager", "late", "random:1", "starved:0", "starved:13"}},
    {"d64", {"random:2"}},
    {"h128", {"late"}},
    {"sq5", {"random:1"}},
    {"sq9", {"random:3"}},
    {"lengths-out-of-range", {"random:4"}},
    {"absent", {"late", "random:5"}},
    {"nan-larger", {"random:6"}},
    {"reversed", {"random:7"}},
    {"no-page", {"eager"}},
    {"long-h64-sq1", {"random:8"}},
    {"long-h64-sq2", {"late"}},  // 128 columns
    {"h64-sq4", {"random:9"}},   // 256
    {"h64-plateau", {"late"}},
    {"lengths-of-queries", {"random:10"}},
    {"lengths-of-queries-h64", {"late"}},
    {"lengths-of-queries-out-of-range", {"random:11"}},
    {"batches", {"eager"}, 24},  // a cluster of eight blocks chooses
};
// Those in which warps meet in ways of their own, under all schedules: a query or several in a
// group, few tiles and many, two blocks that choose for a query, absent pages.
const std::vector<std::string> kEach = {"eager", "late", "random:1", "starved:14"};
const std::vector<PassingCase> kThoroughCases = joined({
    under(kEach, "h1", "h3", "h32", "d128", "k1", "k2048", "sq2", "sq5", "sq9", "h128-sq3",
          "no-table", "no-page", "long-h64-sq2", "shared", "absent-positions", "positions",
          "bf16-weights", "wide", "reversed", "broadcast", "equal-larger", "nan-smaller",
          "h16-plateau", "lengths-of-queries-groups", "h128-plateau-larger"),
    under(kMany, "h64", "h128", "d64", "h64-sq4", "long", "long-h64-sq1", "absent",
          "lengths-of-queries-h64"),
    {{"batches", kFew}, {"lengths-of-queries-long", kFew}},
});

// 59 tiles, of which each of the two blocks takes half: the ring is used again. Many groups: so
// are the places of heads.
const BugsOf tiles{"topk_paged_sm90.cuh", "long"}, groups{"topk_paged_sm90.cuh", "sq9"};
const BugsOf product{"score_tiles_sm90.cuh", "long"};
// Two products for each page.
const BugsOf sides{"topk_paged_sm90.cuh", "h64-sq4"};
// Two blocks choose for one query.
const BugsOf choice{"choose_sm90.cuh", "batches"};
const BugsOf choice_of_eight{"choose_sm90.cuh", "batches", 24};

const BugsOf batches{"choose.cuh", "batches"};

const std::vector<PlantedBug> kQuickBugs = {
    groups("NoWaitForHeads", "shared.heads_full()[heads.stage].wait", drop),
    groups("NoArrivalOfHeadCopies", "shared.heads_full()[heads.stage].arrive_cp_async", drop),
    choice("NoBarrierOfTheCluster", "device::cluster_sync();", drop),
    in_one_schedule(beyond_a_pair(
        choice_of_eight("WordsOfTwoBlocks", "return device::ld_shared_cluster(", drop))),
    in_one_schedule(
        race(batches("ChoiceBeforeTheScores", "device::wait_for_kernel_before();", drop))),
    in_one_schedule(race(batches("BinsByPlainStores", "atomicAdd(shared_.bins[0] + (key", weaken))),
    in_one_schedule(BugsOf{"page_line.cuh", "sq9"}("TilesBeforeTheKernelBefore",
                                                   "device::wait_for_kernel_before(last);", drop)),
    in_one_schedule(tiles("CountOfEmptyTooSmall", "shared.empty()[i].init", add, -1)),
};
const std::vector<PlantedBug> kThoroughBugs = {
    tiles("NoWaitForEmptyStage", "shared.empty()[ring.stage].wait", drop),
    tiles("SwappedPhaseOfStages", "shared.empty()[ring.stage].wait", add, 1),
    tiles("NoWaitForKeys", "shared.full()[ring.stage].wait", drop),
    tiles("SwappedPhaseOfKeys", "shared.full()[ring.stage].wait", add, 1),
    groups("NoWaitForFreeHeads", "shared.heads_empty()[heads.stage].wait", drop),
    groups("SwappedPhaseOfHeads", "shared.heads_full()[heads.stage].wait", add, 1),
    groups("NoArrivalOfWeights", "shared.heads_full()[heads.stage].arrive_warp", drop),
    groups("NoArrivalOfFreeHeads", "shared.heads_empty()[heads.stage].arrive_warp", drop),
    tiles("TooFewBytesOfKeys", "shared.full()[ring.stage].arrive_expect", add, -16),
    tiles("TooManyBytesOfKeys", "shared.full()[ring.stage].arrive_expect", add, 16),
    tiles("NoCopyOfKeys", "tensor_load(shared.pages()[", drop),
    tiles("NoWaitForProducts", "device::wgmma_wait<0>();", drop),
    tiles("WaitForTooFewGroups", "device::wgmma_wait<0>();", add, 1),
    tiles("NoArrivalOfEmpty", "shared.empty()[ring.stage].arrive_warp", drop),
    tiles("CountOfFullTooLarge", "shared.full()[i].init", add, 1),
    tiles("CountOfFullOfOnePage", "shared.full()[i].init", add, -1),
    groups("CountOfHeadsEmptyOfTwoWarpgroups", "shared.heads_empty()[i].init", add, -4),
    groups("CountOfHeadsFullTooSmall", "shared.heads_full()[i].init", add, -1),
    tiles("NoInitFence", "fence_mbarrier_init();", drop),
    sides("NoWaitForProductsOfTwoSides", "device::wgmma_wait<0>();", drop),
    choice("BlockEndsTooEarly", "device::cluster_wait();", drop),
    choice("NoArrivalBehindTheCounts", "device::cluster_arrive();", drop),
    choice("BinsOfAnotherBlock", "static_cast<std::uint32_t>(rank)));", add, 1),
    sides("NoBarrierOfTerms", "bar_sync<128 * kPagedMultiplyWarpgroups>(1);", drop),
    product("NoProductFence", "device::wgmma_fence();", drop),
    product("NoCommit", "device::wgmma_commit();", drop),
    product("DescriptorWithoutSwizzle", "wgmma_m64n64k32_f8(product", add, std::int64_t{3} << 62),
};

WINNOW_SIMULATOR_TESTS(SimulatorTopkPaged, topk_paged_operation(), kQuickCases, kThoroughCases,
                       kQuickBugs, kThoroughBugs);

}  // namespace
}  // namespace winnow::indexer
