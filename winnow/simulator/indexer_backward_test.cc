// indexer::backward of sm90 in the simulator.
#include "winnow/simulator/indexer_simulation.h"

namespace winnow::indexer {

testing::Operation backward_operation();

namespace {

const std::vector<PassingCase> kQuickCases = {
    {"bf16-h64", {"eager", "late", "random:1", "starved:2", "starved:5", "starved:7"}},
    {"bf16-h96-deterministic", {"late", "random:2"}},
    {"bf16-h16-dense-all-options", kFew},
    {"bf16-d64-h64", {"random:3"}},
    {"bf16-d64-h64-dense-all-options", {"late"}},
    {"bf16-all-rules-as-q", {"random:1"}},
    {"bf16-k512", {"random:4"}},
    {"bf16-sq3-k0", {"late"}},
    {"f8_e4m3-h64", {"late", "random:5"}},
    {"f8_e4m3-d64-h16-dense-all-options", {"random:6"}},
};
const std::vector<PassingCase> kThoroughCases =
    under(kMany, "bf16-h1", "bf16-h64", "bf16-h64-dense", "bf16-h96", "bf16-h96-as-q",
          "bf16-h128-deterministic", "bf16-d64-h16", "bf16-d64-h64-dense-all-options", "bf16-k512",
          "bf16-sq1-k0", "bf16-sq3-k0-deterministic", "bf16-sk0", "bf16-sk1", "bf16-ranges-empty",
          "bf16-ranges-ragged-dense", "bf16-all-rules-dense-all-options", "bf16-wide",
          "bf16-weights-bf16-as-q", "bf16-nan", "f8_e4m3-h64", "f8_e4m3-h96-deterministic",
          "f8_e4m3-d64-h16", "f8_e4m3-k512", "f8_e4m3-sq3-k0", "f8_e4m3-sk0",
          "f8_e4m3-ranges-ragged-dense", "f8_e4m3-all-rules-as-q", "f8_e4m3-nan");

// 8 tiles of an item and two items of the first block: the ring of rows, the sums and q are used
// again.
const BugsOf bug{"backward_sm90.cuh", "bf16-k512"};
const BugsOf many{"backward_sm90.cuh", kManyItems};
const BugsOf f8{"backward_sm90.cuh", "f8_e4m3-k512"};

const BugsOf fixed{"backward_sm90.cuh", "bf16-h96-deterministic"};
const BugsOf bounds{"backward_sums.cuh", "bf16-h96-deterministic"};

const std::vector<PlantedBug> kQuickBugs = {
    bug("NoWaitForRows", "shared.full()[ring.stage].wait", drop),
    bug("NoProxyFence", "stmatrix_x4(at ^ 32 * k16", drop, 0, 3),
    f8("NoProxyFenceOfWidenedRows", "barrier.arrive();", drop, 0, -1),
    bug("NoBarrierBeforeTheImage", "// all warps are done with the image of the tile before", drop),
    in_one_schedule(race(bug("PlainSumsOfDk", "reduce_add(dk + target[i] * p.dk_stride", weaken))),
    in_one_schedule(race(fixed("FixedPlainSums", "reduce_add(to + 32 * half", weaken))),
    in_one_schedule(race(bounds("PlainBounds", "atomicMax(p.bounds + row", weaken))),
};
const std::vector<PlantedBug> kThoroughBugs = {
    bug("NoWaitForEmptyStage", "shared.empty()[ring.stage].wait", drop),
    bug("SwappedPhaseOfStages", "shared.empty()[ring.stage].wait", add, 1),
    bug("SwappedPhaseOfRows", "shared.full()[ring.stage].wait", add, 1),
    bug("NoWaitForQ", "shared.q_full().wait", drop),
    bug("NoWaitForFreeQ", "shared.q_free().wait", drop),
    bug("NoWaitForSums", "shared.sums_full()[chunk].wait", drop),
    bug("SwappedPhaseOfSums", "shared.sums_full()[chunk].wait", add, 1),
    bug("NoWaitForFreeSums", "wgmma_pin(sums[chunk]);", drop, 0, 2),
    bug("NoBarrierBehindTheImage", "stmatrix_x4(at ^ 32 * k16", drop, 0, 4),
    bug("ImageElsewhere", "stmatrix_x4(at ^ 32 * k16", add, 128),
    bug("NoWaitForLogits", "wgmma_pin(s);", drop, 0, -1),
    bug("WaitForTooFewGroups", "wgmma_wait<kChunks - 1>();", add, 1),
    bug("NoWaitForProducts", "wgmma_wait<kChunks - 1>();", drop),
    bug("NoWaitForTheLastSums", "wgmma_pin(sums[chunk]);", drop, 0, -1),
    bug("NoArrivalOfCopies", "barrier.arrive_cp_async();", drop),
    f8("NoArrivalOfWidenedRows", "barrier.arrive();", drop),
    bug("NoArrivalOfTheMask", "full.arrive_warp();", drop),
    bug("LateMask", "shared.mask()[ring.stage][warp].store", delay),
    bug("LateScores", "shared.d_scores()[ring.stage][local].store", delay),
    bug("NoTargets", "shared.targets()[count % kTargetTiles][local].store", drop),
    bug("NoArrivalOfFreeQ", "shared.q_free().arrive_warp", drop),
    bug("NoArrivalOfFreeSums", "shared.sums_free()[chunk].arrive_warp", drop),
    bug("NoCommitOfLogits", "wgmma_pin(s);", drop, 0, -2),
    bug("NoCommitOfSums", "wgmma_wait<kChunks - 1>();", drop, 0, -2),
    bug("NoProductFence", "const std::uint64_t rows_mn = descriptor_mn_major(rows);", drop, 0, 2),
    bug("DescriptorOfTheNextRows", "wgmma_m64n64k16<Major::MN, Major::MN>(sums", add, 128),
    bug("DescriptorOfAnotherStride", "wgmma_m64n128k16<Major::MN>(dq", add, std::int64_t{1} << 32),
    bug("CountOfFullTooSmall", "shared.full()[i].init", add, -1),
    bug("CountOfEmptyTooSmall", "shared.empty()[i].init", add, -1),
    bug("CountOfQFullTooSmall", "shared.q_full().init", add, -1),
    many("CountOfQFreeTooSmall", "shared.q_free().init", add, -1),
    bug("CountOfSumsFullTooSmall", "shared.sums_full()[i].init", add, -1),
    bug("CountOfSumsFreeTooSmall", "shared.sums_free()[i].init", add, -1),
    bug("NoInitFence", "fence_mbarrier_init();", drop),
    bug("NoBarrierAfterInit", "fence_mbarrier_init();", drop, 0, 2),
};

WINNOW_SIMULATOR_TESTS(SimulatorIndexerBackward, backward_operation(), kQuickCases, kThoroughCases,
                       kQuickBugs, kThoroughBugs);

}  // namespace
}  // namespace winnow::indexer
