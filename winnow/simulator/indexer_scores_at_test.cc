// Bugs planted in the kernel of the indexer's scores at indices, sm90; indexer_scores_test.cc runs
// it as it is. A wait for heads that is missing is no bug: each lane's arrival for its first rows
// comes behind its copies of the heads.
#include "winnow/simulator/indexer_simulation.h"

namespace winnow::indexer {

testing::Operation scores_operation();

namespace {

const std::vector<PassingCase> kQuickCases = {{"bf16-k512", {"random:5"}},
                                              {"f8_e4m3-k300", {"late"}}};
const std::vector<PassingCase> kThoroughCases = {{"f8_e4m3-k300", kMany}};

// 8 tiles of an item: the ring of rows is used again. Three items of the first block: so are the
// two places of heads.
const BugsOf rows{"scores_at_sm90.cuh", "bf16-k512"},
    heads{"scores_at_sm90.cuh", "bf16-ranges-ragged"};
const BugsOf many{"scores_at_sm90.cuh", kManyItems};
const BugsOf f8{"scores_at_sm90.cuh", "f8_e4m3-k512"};

const std::vector<PlantedBug> kQuickBugs = {
    rows("NoWaitForRows", "shared.full()[ring.stage].wait", drop),
    rows("NoWaitForEmptyStage", "shared.empty()[ring.stage].wait", drop),
    in_one_schedule(rows("CountOfEmptyTooSmall", "shared.empty()[i].init", add, -1)),
};
const std::vector<PlantedBug> kThoroughBugs = {
    rows("SwappedPhaseOfRows", "shared.full()[ring.stage].wait", add, 1),
    rows("SwappedPhaseOfStages", "shared.empty()[ring.stage].wait", add, 1),
    heads("NoWaitForFreeHeads", "shared.heads_empty()[buffer.stage].wait", drop),
    rows("NoArrivalOfCopies", "full.arrive_cp_async();", drop),
    rows("NoArrivalOfHeads", "shared.heads_full()[buffer.stage].arrive_cp_async", drop),
    rows("NoArrivalOfTheMask", "full.arrive_warp();", drop),
    rows("LateMask", "shared.mask()[ring.stage][warp].store", delay),
    f8("NoScale", "shared.k_scale()[ring.stage][kWarpRows * warp + lane].store", drop),
    rows("NoArrivalOfEmpty", "shared.empty()[ring.stage].arrive_warp", drop),
    heads("NoArrivalOfFreeHeads", "shared.heads_empty()[buffer.stage].arrive_warp", drop),
    rows("NoWaitForProducts", "wgmma_wait<0>();", drop),
    rows("WaitForTooFewGroups", "wgmma_wait<0>();", add, 1),
    rows("NoCommit", "wgmma_commit();", drop),
    rows("NoProductFence", "wgmma_fence();", drop),
    rows("DescriptorOfTheNextColumns", "wgmma_m64n64k16<Major::K, Major::K>(d", add, 2),
    f8("DescriptorWithoutSwizzle", "wgmma_m64n128k32_f8(d", add, std::int64_t{3} << 62),
    rows("CountOfFullTooSmall", "shared.full()[i].init", add, -1),
    many("CountOfHeadsEmptyTooSmall", "shared.heads_empty()[i].init", add, -1),
    rows("NoInitFence", "fence_mbarrier_init();", drop),
    rows("NoBarrierAfterInit", "  __syncthreads();", drop),
};

WINNOW_SIMULATOR_TESTS(SimulatorScoresAt, scores_operation(), kQuickCases, kThoroughCases,
                       kQuickBugs, kThoroughBugs);

}  // namespace
}  // namespace winnow::indexer
