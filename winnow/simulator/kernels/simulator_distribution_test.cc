// sparse_mla::distribution of sm90 in the simulator. A wait for the ping-pong that is missing is no
// bug: it only says which warpgroup multiplies first, so that the other has the exponentials. Nor
// is a proxy fence behind the copies of rows, as simulator.md says.
#include "winnow/simulator/kernels/sparse_mla_simulation.h"
#include "winnow/sparse_mla/cases.h"

namespace winnow::sparse_mla {

testing::Operation distribution_operation();

namespace {

const std::vector<std::string> kFew = schedules(1, {12});
const std::vector<std::string> kMany = schedules(5, {0, 5, 9, 12});

const std::vector<PassingCase> kQuickCases = {
    {"bf16-h64", kFew},
    {"bf16-h128", {"late", "random:2"}},
    {"bf16-h192", {"random:3"}},
    {"bf16-d512-h64-k512", {"random:3"}},
    {"bf16-dense-h70-d512", {"late"}},  // three tiles of two blocks of heads
    {"bf16-all-rules", kFew},
    {"bf16-dense-ragged", {"late", "random:1"}},
    {"bf16-extra-range-list", {"late"}},
    {"bf16-extra-list-range-all-rules", {"random:4"}},
};
const std::vector<PassingCase> kThoroughCases = under(
    kMany, "bf16-h64", "bf16-h96", "bf16-h192", "bf16-k0", "bf16-k1", "bf16-k512",
    "bf16-d512-h16-k100", "bf16-d512-h64-k512", "bf16-length-ragged", "bf16-dense-ragged-h70-d512",
    "bf16-dense-outside", "bf16-all-rules", "bf16-extra-list-list", "bf16-extra-range-range",
    "bf16-extra-h0", "bf16-extra-rows0", "bf16-extra-alone");

// 8 tiles of 64 heads, which the two multiplying warpgroups take in turn; the ring is used again.
const BugsOf bug{"distribution_sm90.cuh", "bf16-k512"};
// Both warpgroups work on every tile.
const BugsOf wide_bug{"distribution_sm90.cuh", "bf16-h128"};

const std::vector<PlantedBug> kQuickBugs = {
    race(bug("NoWaitForRows", "ring.parity, \"multiply\", ring.stage);", drop)),
    saying("race: cp.async",
           bug("NoWaitForEmptyStage", "ring.parity ^ 1, \"gather\", ring.stage);", drop)),
    in_one_schedule(bug("CountOfEmptyTooSmall", "shared.empty()[slot].init", add, -1)),
};
const std::vector<PlantedBug> kThoroughBugs = {
    bug("NoWaitForHeads", "ring.parity, \"heads\", ring.stage);", drop),
    bug("NoWaitForFreeSums", "shared.free()[buffer].wait", drop),
    bug("NoWaitForSums", "shared.ready()[buffer].wait", drop),
    bug("SwappedPhaseOfRows", "ring.parity, \"multiply\", ring.stage);", add, 1),
    bug("SwappedPhaseOfStages", "ring.parity ^ 1, \"gather\", ring.stage);", add, 1),
    bug("SwappedPhaseOfSums", "shared.ready()[buffer].wait", add, 1),
    bug("EarlyRelease", "device::wgmma_wait<1>();", drop),
    bug("WaitForTooFewGroups", "device::wgmma_wait<1>();", add, 1),
    bug("NoWaitForLogits", "device::wgmma_wait<0>();", drop),
    bug("CountOfFullTooSmall", "shared.full()[slot].init", add, -1),
    bug("CountOfReadyTooSmall", "shared.ready()[buffer].init", add, -1),
    bug("CountOfPingPongTooSmall", "shared.ping_pong()[warpgroup].init", add, -1),
    saying("mbarrier: no fence.mbarrier_init",
           bug("NoInitFence", "device::fence_mbarrier_init();", drop)),
    bug("NoBarrierAfterInit", "  __syncthreads();", drop),
    bug("NoProductFence", "    device::wgmma_fence();", drop),
    bug("DescriptorOfTheNextColumns", "device::wgmma_m64n64k16<device::Major::K>(logits", add, 1),
    bug("DescriptorOfAnotherStride", "device::wgmma_m64n64k16<device::Major::K>(logits", add,
        std::int64_t{1} << 32),
    saying("deadlock: ",
           bug("NoArrivalOfCopies", "shared.full()[ring.stage].arrive_cp_async();", drop)),
    bug("NoArrivalOfSums", "shared.ready()[buffer].arrive_warp(both);", drop),
    wide_bug("NoWaitForRowsWide", "ring.parity, \"multiply\", ring.stage);", drop),
    wide_bug("EarlyReleaseWide", "device::wgmma_wait<1>();", drop),
    wide_bug("CountOfReadyTooSmallWide", "shared.ready()[buffer].init", add, -1),
};

WINNOW_SIMULATOR_TESTS(SimulatorDistribution, distribution_operation(), kQuickCases, kThoroughCases,
                       kQuickBugs, kThoroughBugs);

}  // namespace
}  // namespace winnow::sparse_mla
