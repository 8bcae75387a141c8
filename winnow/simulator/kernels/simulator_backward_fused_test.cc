// sparse_mla::backward of sm90 in the simulator: the fused design, which takes up to 64 heads, and
// with the bounds before it the deterministic mode.
#include "winnow/simulator/kernels/sparse_mla_simulation.h"
#include "winnow/sparse_mla/cases.h"

namespace winnow::sparse_mla {

testing::Operation backward_operation();

namespace {

const std::vector<std::string> kFew = schedules(1, {5});
const std::vector<std::string> kMany = schedules(4, {0, 3, 4, 7});
const std::vector<std::string> kTwo = {"late", "random:5"};

const std::vector<PassingCase> kQuickCases = {
    {"bf16-h64", kFew},
    {"bf16-k512", {"late", "random:2"}},
    {"bf16-d512-h16-k100", {"random:3"}},
    {"bf16-all-rules", {"late", "random:4"}},
    {"bf16-d512-h16-k100-deterministic", kFew},
    {"bf16-h16-k600-deterministic", {"late"}},
    {"bf16-all-rules-all-options", {"late", "random:4"}},
    // Ranges and two sources.
    {"bf16-dense-ragged", {"random:1"}},
    {"bf16-dense-h130", {"random:2"}},
    {"bf16-extra-range-list", {"eager", "starved:5"}},
    {"bf16-extra-list-list", {"random:4"}},
    {"bf16-extra-range-list-all-rules-deterministic", {"random:4"}},
};
const std::vector<PassingCase> kThoroughCases = joined({
    under(kMany, "bf16-h64", "bf16-h3", "bf16-k0", "bf16-k1", "bf16-k512", "bf16-length-ragged",
          "bf16-some-nothing", "bf16-all-rules-all-options", "bf16-all-rules", "bf16-h16-delta",
          "bf16-all-rules-nan-in-dead", "bf16-all-rules-nan-in-dead-deterministic",
          "bf16-h16-deterministic", "bf16-d512-h16-k100-deterministic",
          "bf16-all-rules-deterministic", "bf16-wide-all-options"),
    under(kTwo, "bf16-d512-h64-k512", "bf16-dense", "bf16-dense-ragged", "bf16-dense-late",
          "bf16-dense-empty", "bf16-dense-outside", "bf16-dense-h70-d512",
          "bf16-dense-ragged-h70-d512", "bf16-dense-late-h70-d512", "bf16-dense-empty-h70-d512",
          "bf16-dense-outside-h70-d512", "bf16-dense-skv0", "bf16-dense-skv1", "bf16-dense-h130",
          "bf16-dense-sq300", "bf16-dense-skv20000", "bf16-dense-causal", "bf16-extra-list-list",
          "bf16-extra-list-range", "bf16-extra-range-list", "bf16-extra-range-range",
          "bf16-extra-list-list-all-rules", "bf16-extra-list-range-all-rules",
          "bf16-extra-range-list-all-rules", "bf16-extra-range-range-all-rules", "bf16-extra-sq0",
          "bf16-extra-h0", "bf16-extra-k0", "bf16-extra-range-range-h130",
          "bf16-extra-range-range-h130-deterministic", "bf16-extra-rows0", "bf16-extra-nothing",
          "bf16-extra-alone", "bf16-extra-skv0", "bf16-extra-range-empty",
          "bf16-extra-range-list-all-rules-dq-f32", "bf16-extra-range-list-all-rules-dkv-as-q",
          "bf16-extra-range-list-all-rules-delta", "bf16-extra-range-list-all-rules-deterministic",
          "bf16-extra-range-list-all-rules-all-options",
          "bf16-extra-range-list-all-rules-nan-in-dead",
          "bf16-extra-range-list-all-rules-nan-in-dead-deterministic"),
    {{"bf16-k2048", {"eager", "late", "random:1"}}},
});

// 8 tiles a query, two queries a block.
const BugsOf bug{"backward_fused_sm90.cuh", "bf16-k512"};
// 32 tiles: the kernel forms delta itself.
const BugsOf long_bug{"backward_fused_sm90.cuh", "bf16-k2048"};
// Four queries of two tiles.
const BugsOf bounds_bug{"backward_bounds_sm90.cuh", "bf16-d512-h16-k100-deterministic"};
const BugsOf drain_bug{"backward_fused_drain_sm90.cuh", "bf16-d512-h16-k100-deterministic"};
// Ranges of up to three tiles before a list, and shares of the tail.
const BugsOf ranges_bug{"backward_fused_sm90.cuh", "bf16-extra-range-list"};
const BugsOf order_bug{"backward_fused_steps_sm90.cuh", "bf16-extra-range-list"};
const BugsOf ranges_bounds{"backward_bounds_sm90.cuh",
                           "bf16-extra-range-list-all-rules-deterministic"};
const BugsOf select_bug{"backward_split_sm90.cuh", "bf16-extra-range-list-all-rules-deterministic"};
// Several tiles a block and warpgroup.
const BugsOf many_tiles{"backward_bounds_sm90.cuh", "bf16-all-rules-deterministic"};

const BugsOf sums_bug{"backward_fused_drain_sm90.cuh", "bf16-k512"};

const std::vector<PlantedBug> kQuickBugs = {
    saying("proxy fence: wgmma", bug("NoProxyFence", "fence_proxy_async_shared();", drop)),
    race(bug("NoWaitForFreeRows", "shared.k_free().wait(progress", drop)),
    race(bounds_bug("BoundsNoBarrier", "bar_sync<128>(1 + warpgroup);", drop)),
    drain_bug("FixedNoSums", "reduce_add(params.fixed", drop),
    ranges_bug("RangesNoWaitForRows", "shared.k_full()[chunk].wait(k_parity", drop),
    race(order_bug("SourcesNoBarrier", "place[thread] = sum - count;", drop, 0, 2)),
    in_one_schedule(race(sums_bug("PlainSumsOfDkv", "reduce_add(to + 4 * kLanes * k", weaken))),
    in_one_schedule(race(drain_bug("FixedPlainSums", "reduce_add(params.fixed", weaken))),
    in_one_schedule(race(bounds_bug("BoundsPlainMaximum", "atomicMax(p.row_bounds + row", weaken))),
    in_one_schedule(
        race(bounds_bug("BoundsPlainCounts", "atomicAdd(p.row_counts + row, 1u)", weaken))),
    in_one_schedule(bug("CountOfScoresTooSmall", "shared.scores().init(kWarps", add, -1)),
    in_one_schedule(race(
        order_bug("RangesCountedByPlainStores", "[&](std::int32_t index) { atomicAdd(", weaken))),
};
const std::vector<PlantedBug> kThoroughBugs = {
    bug("NoWaitForRows", "shared.k_full()[chunk].wait(k_parity", drop),
    bug("NoWaitForQueries", "if (first) shared.q_full()[chunk].wait", drop),
    bug("NoWaitForFreeQueries", "shared.q_free()[chunk].wait", drop),
    bug("NoWaitForFreeScores", "shared.scores_free().wait(progress", drop),
    bug("NoWaitForScores", "shared.scores().wait(parity", drop),
    bug("SwappedPhaseOfRows", "shared.k_full()[chunk].wait(k_parity", add, 1),
    bug("SwappedPhaseOfScores", "shared.scores().wait(parity", add, 1),
    bug("SwappedPhaseOfFreeScores", "shared.scores_free().wait(progress", add, 1),
    bug("NoWaitForLogits", "Queued before P and dS are handed over", drop, 0, -5),
    bug("EarlyCopyOverRows", "Queued before P and dS are handed over", drop, 0, 29),
    bug("EarlyReleaseOfRows", "    wgmma_wait<1>();", drop),
    bug("TooFewGroupsBeforeRelease", "    wgmma_wait<1>();", add, 1),
    bug("CountOfRowsTooSmall", "shared.k_full()[chunk].init", add, -1),
    bug("CountOfQueriesTooSmall", "shared.q_full()[chunk].init", add, -1),
    bug("CountOfScoresFreeTooSmall", "shared.scores_free().init(kWarps", add, -1),
    bug("NoInitFence", "fence_mbarrier_init();", drop),
    bug("NoBarrierAfterInit", "  __syncthreads();", drop),
    bug("NoFenceOfProducts", "Queued before P and dS are handed over", drop, 0, 3),
    bug("LateTargets", "shared.targets()[parity][row].store(target);", delay),
    bug("DescriptorOfTheNextRow", "wgmma_m64n256k16<Major::K, Major::MN>(", add, 8),
    bug("NoGradientOfScores", "stmatrix_x4(to + (shared.ds().address - shared.p(", drop),
    saying("proxy fence: wgmma", bug("LateProxyFence", "fence_proxy_async_shared();", delay)),
    saying("deadlock: ", bug("NoArrivalOfRows", "shared.k_full()[chunk].arrive_cp_async();", drop)),
    bounds_bug("BoundsLateShares", "st_shared(buffer", delay),
    bounds_bug("BoundsNoShares", "st_shared(buffer", drop),
    bounds_bug("BoundsNoInitFence", "fence_mbarrier_init();", drop),
    bounds_bug("BoundsNoBarrierAfterInit", "fence_mbarrier_init();", drop, 0, 2),
    bounds_bug("BoundsCountOfFull", "shared.full()[slot].init", add, -1),
    many_tiles("BoundsCountOfEmpty", "shared.empty()[slot].init", add, -1),
    ranges_bug("RangesNoWaitForFreeRows", "shared.k_free().wait(progress", drop),
    ranges_bug("RangesLateTargets", "shared.targets()[parity][row].store(target);", delay),
    ranges_bounds("BoundsOfRangesNoBarrier", "bar_sync<128>(1 + warpgroup);", drop),
    ranges_bounds("BoundsOfRangesNoShares", "st_shared(buffer", drop),
    race(select_bug("SourcesSelectNoBarrier",
                    "counts[thread / kPrepareWarps][thread % kPrepareWarps] = 0;", drop, 0, 1)),
    long_bug("NoDeltaBarrier", "a quad's delta is written by one of its lanes", drop),
};

WINNOW_SIMULATOR_TESTS(SimulatorBackwardFused, backward_operation(), kQuickCases, kThoroughCases,
                       kQuickBugs, kThoroughBugs);

}  // namespace
}  // namespace winnow::sparse_mla
