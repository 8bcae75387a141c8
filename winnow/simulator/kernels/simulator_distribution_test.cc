// sparse_mla::distribution of sm90 in the simulator.
#include "winnow/simulator/testing/simulate.h"
#include "winnow/sparse_mla/cases.h"

namespace winnow::sparse_mla {

testing::Operation distribution_operation();
std::vector<testing::Benchmark> distribution_benchmarks() { return {}; }

namespace {

using simulator::PassingCase;
using simulator::Plant;
using simulator::PlantedBug;
using Action = Plant::Action;

const std::vector<std::string> kFew = {"eager", "late", "random:1", "starved:12"};
const std::vector<std::string> kMany = {"eager",     "late",      "random:1",  "random:2",
                                        "random:3",  "random:4",  "random:5",  "starved:0",
                                        "starved:5", "starved:9", "starved:12"};

const std::vector<PassingCase> kQuickCases = {
    {"bf16-h64", kFew},          {"bf16-h128", {"late", "random:2"}},
    {"bf16-h192", {"random:3"}}, {"bf16-d512-h64-k512", {"random:3"}},
    {"bf16-all-rules", kFew},
};
const std::vector<PassingCase> kThoroughCases = {
    {"bf16-h64", kMany},
    {"bf16-h96", kMany},
    {"bf16-h192", kMany},
    {"bf16-k0", kMany},
    {"bf16-k1", kMany},
    {"bf16-k512", kMany},
    {"bf16-d512-h16-k100", kMany},
    {"bf16-d512-h64-k512", kMany},
    {"bf16-length-ragged", kMany},
    {"bf16-all-rules", kMany},
};

const std::vector<std::string> kBugSchedules = {"eager", "late", "random:1", "random:2"};

// 8 tiles of 64 heads, which the two multiplying warpgroups take in turn; the ring is used again.
PlantedBug bug(const char* name, const char* text, Action action, std::int64_t addend = 0,
               int below = 0) {
  return {name,
          "bf16-k512",
          {.file = "distribution_sm90.cuh",
           .text = text,
           .action = action,
           .addend = addend,
           .below = below},
          kBugSchedules};
}
// Both warpgroups work on every tile.
PlantedBug wide_bug(const char* name, const char* text, Action action, std::int64_t addend = 0) {
  PlantedBug planted = bug(name, text, action, addend);
  planted.of_case = "bf16-h128";
  return planted;
}

const std::vector<PlantedBug> kQuickBugs = {
    saying("race: ", bug("NoWaitForRows", "ring.parity, \"multiply\", ring.stage);", Action::drop)),
    saying("race: cp.async",
           bug("NoWaitForEmptyStage", "ring.parity ^ 1, \"gather\", ring.stage);", Action::drop)),
};
const std::vector<PlantedBug> kThoroughBugs = {
    bug("NoWaitForHeads", "ring.parity, \"heads\", ring.stage);", Action::drop),
    bug("NoWaitForFreeSums", "device::mbarrier_wait(shared.free(buffer)", Action::drop),
    bug("NoWaitForSums", "device::mbarrier_wait(shared.ready(buffer)", Action::drop),
    bug("SwappedPhaseOfRows", "ring.parity, \"multiply\", ring.stage);", Action::add, 1),
    bug("SwappedPhaseOfStages", "ring.parity ^ 1, \"gather\", ring.stage);", Action::add, 1),
    bug("SwappedPhaseOfSums", "device::mbarrier_wait(shared.ready(buffer)", Action::add, 1),
    bug("EarlyRelease", "device::wgmma_wait<1>();", Action::drop),
    bug("WaitForTooFewGroups", "device::wgmma_wait<1>();", Action::add, 1),
    bug("NoWaitForLogits", "device::wgmma_wait<0>();", Action::drop),
    bug("CountOfFullTooSmall", "mbarrier_init(shared.full(slot)", Action::add, -1),
    bug("CountOfEmptyTooSmall", "mbarrier_init(shared.empty(slot)", Action::add, -1),
    bug("CountOfReadyTooSmall", "mbarrier_init(shared.ready(buffer)", Action::add, -1),
    bug("CountOfPingPongTooSmall", "mbarrier_init(shared.ping_pong(warpgroup)", Action::add, -1),
    saying("mbarrier: no fence.mbarrier_init",
           bug("NoInitFence", "device::fence_mbarrier_init();", Action::drop)),
    bug("NoBarrierAfterInit", "  __syncthreads();", Action::drop),
    bug("NoProductFence", "    device::wgmma_fence();", Action::drop),
    bug("DescriptorOfTheNextColumns", "device::wgmma_m64n64k16<device::Major::K>(logits",
        Action::add, 1),
    bug("DescriptorOfAnotherStride", "device::wgmma_m64n64k16<device::Major::K>(logits",
        Action::add, std::int64_t{1} << 32),
    saying("deadlock: ",
           bug("NoArrivalOfCopies", "device::mbarrier_arrive_cp_async(shared.full(ring.stage));",
               Action::drop)),
    bug("NoArrivalOfSums", "device::mbarrier_arrive_warp(shared.ready(buffer), both);",
        Action::drop),
    wide_bug("NoWaitForRowsWide", "ring.parity, \"multiply\", ring.stage);", Action::drop),
    wide_bug("EarlyReleaseWide", "device::wgmma_wait<1>();", Action::drop),
    wide_bug("CountOfReadyTooSmallWide", "mbarrier_init(shared.ready(buffer)", Action::add, -1),
};

WINNOW_SIMULATOR_TESTS(SimulatorDistribution, distribution_operation(), kQuickCases, kThoroughCases,
                       kQuickBugs, kThoroughBugs);

}  // namespace
}  // namespace winnow::sparse_mla
