// sparse_mla::forward of sm90 in the simulator. A wait for free queries that is missing is no bug,
// nor is a count of theirs that is too small: the queries of an item are loaded behind its tile 0,
// into whose slot each consumer lets the gather warps only after its last logits of the item
// before. The barrier behind the initialisation is not dropped: the roles would not end, which know
// their turns from there.
#include <algorithm>
#include <ctime>
#include <string>

#include <gmock/gmock.h>

#include "winnow/simulator/kernels/sparse_mla_simulation.h"
#include "winnow/sparse_mla/cases.h"

namespace winnow::sparse_mla {

testing::Operation forward_operation();

namespace {

const std::vector<std::string> kFew = schedules(1, {9});
const std::vector<std::string> kMany = schedules(5, {0, 5, 9, 11});

const std::vector<PassingCase> kQuickCases = {
    {"bf16-h64", kFew},
    {"bf16-h128", {"random:2"}},
    {"bf16-d512-h64-k512", {"late", "random:3"}},
    {"bf16-length-ragged", {"random:4", "starved:2"}},
    {"bf16-all-rules", kFew},
    {"bf16-some-nothing", {"random:5"}},
    {"bf16-flash-mla-lse", {"late"}},
    {"bf16-extra-flash-mla-lse", {"random:6"}},
    {"bf16-skv50000", {"late"}},
    {"bf16-skv50000-h128", {"random:8"}},
    {"bf16-dense-ragged", {"late", "random:1"}},
    {"bf16-later-maxima", {"late", "random:9"}},
    {"bf16-parts", {"late"}},
    {"bf16-extra-list-list", kFew},
    {"bf16-extra-list-range", {"random:3"}},
    {"bf16-extra-range-list", {"late", "random:4"}},
    {"bf16-extra-range-range-all-rules", {"random:5"}},
    {"bf16-extra-strides-among", {"eager"}},
    {"bf16-extra-parts", {"late"}},
};
const std::vector<PassingCase> kThoroughCases = joined({
    under(kMany, "bf16-h64", "bf16-h96", "bf16-h192", "bf16-k0", "bf16-k1", "bf16-k100",
          "bf16-k512", "bf16-d512-h16-k100", "bf16-d512-h64-k512", "bf16-length-ragged",
          "bf16-length-out-of-range", "bf16-all-rules", "bf16-sink-mixed", "bf16-wide",
          "bf16-dense-ragged-h70-d512", "bf16-dense-outside", "bf16-dense-causal",
          "bf16-extra-list-list", "bf16-extra-list-list-all-rules", "bf16-extra-list-range",
          "bf16-extra-list-range-all-rules", "bf16-extra-range-list",
          "bf16-extra-range-list-all-rules", "bf16-extra-range-range",
          "bf16-extra-range-range-all-rules", "bf16-extra-k0", "bf16-extra-rows0",
          "bf16-extra-nothing", "bf16-extra-alone", "bf16-extra-skv0", "bf16-extra-range-empty",
          "bf16-extra-parts"),
    {{"bf16-skv50000", {"eager", "random:6"}},
     {"bf16-extra-strides-before", {"late"}},
     {"bf16-extra-strides-far", {"late"}}},
});

// In bf16-k512 every slot is used again; h 3, 8 tiles a query.
const BugsOf bug{"attention_sm90.cuh", "bf16-k512"}, kernel{"forward_sm90.cuh", "bf16-k512"};

// A cache whose rows are read in order; three items a block, of five tiles.
const BugsOf order{"entry_order_sm90.cuh", "bf16-skv50000"};

// The last of five items has two parts.
const BugsOf parts{"forward_turns_sm90.cuh", "bf16-parts"};

// The same of two sources of rows.
const BugsOf two{"forward_sm90.cuh", "bf16-extra-list-range"};
const BugsOf two_parts{"forward_turns_sm90.cuh", "bf16-extra-parts"};

const std::vector<PlantedBug> kQuickBugs = {
    saying("proxy fence: wgmma", bug("NoProxyFence", "fence_proxy_async_shared();", drop)),
    race(kernel("NoWaitForRows", "shared.full()[kConsumer][kGroup].wait", drop)),
    in_one_schedule(race(parts("FlagWithoutRelease", "st_release_gpu(flag_, 1);", weaken))),
    in_one_schedule(race(parts("FlagWithoutAcquire", "while (ld_acquire_gpu(", weaken))),
    in_one_schedule(
        race(parts("FlagBeforeAllLanesHaveStored", "words_[128 * 33] = make_float4", drop, 0, 1))),
    in_one_schedule(race(parts("StateBeforeTheFlagIsKnown", "while (ld_acquire_gpu(", drop, 0, 3))),
    in_one_schedule(bug("CountOfEmptyTooSmall", "shared.empty()[slot][group].init", add, -1)),
};
const std::vector<PlantedBug> kThoroughBugs = {
    race(order("OrderOverTheSegmentBefore", "// nobody reads the segment before", drop)),
    race(order("OrderNoWaitForCounts", "device::st_shared(segment + 4 * thread, counted);", drop, 0,
               1)),
    race(order("OrderOverCounts", "place += device::warp_prefix", drop, 0, 1)),
    race(order("OrderNoWaitForEntries", "place += __popc(lanes.with(lane));", drop, 0, 2)),
    parts("NobodyHandsOn", "st_release_gpu(flag_, 1);", drop),
    race(two("NoWaitForRowsOfTwo", "shared.full()[kConsumer][kGroup].wait", drop)),
    two("NoWaitForQueriesOfTwo", "shared.q_full()[group].wait", drop),
    two_parts("NobodyHandsOnOfTwo", "st_release_gpu(flag_, 1);", drop),
    bug("NoWaitForEmptySlot", "shared.empty()[kSlot][group].wait", drop),
    kernel("NoWaitForQueries", "shared.q_full()[group].wait", drop),
    bug("NoWaitForProbabilities", "shared.p_ready()[other].wait", drop),
    race(bug("NoWaitForSums", "shared.sum_ready().wait", drop)),
    bug("SwappedPhaseOfProbabilities", "shared.p_ready()[other].wait", add, 1),
    bug("SwappedPhaseOfSlots", "shared.empty()[kSlot][group].wait", add, 1),
    saying("race: cp.async", bug("EarlyRelease", "wgmma_wait<1 + kBehind>", drop)),
    saying("wait as \"gather\"", kernel("NoReleaseOfRope", "shared.empty()", drop)),
    bug("EarlyReleaseOfTheSecondHalf", "wgmma_wait<kBehind>", drop),
    saying("race: cp.async", kernel("EarlyReleaseOfTheOther", "// the first half of P V", drop)),
    kernel("EarlyReleaseOfTheOthersSecondHalf", "// the second half of P V", drop),
    kernel("ReleaseOneProductEarly", "// the first half of P V", add, 1),
    kernel("NoWaitForLogits", "wgmma_wait<kBefore ? 2 : 0>();", drop),
    kernel("WaitForTooFewGroups", "wgmma_wait<kBefore ? 2 : 0>();", add, 1),
    saying("race: wgmma", bug("CountOfFullTooSmall", "shared.full()[slot][group].init", add, -1)),
    bug("CountOfSumReadyTooSmall", "shared.sum_ready().init", add, -1),
    bug("CountOfQFreeTooLarge", "shared.q_free().init", add, 1),
    saying("mbarrier: no fence.mbarrier_init", kernel("NoInitFence", "fence_mbarrier_init(", drop)),
    saying("race: a load", bug("LateMask", "shared.mask()[kSlot].store(mask);", delay)),
    saying("wgmma: registers are handed over",
           bug("NoFenceOfOwnValues", "Queues o += P V for an owned tile", drop, 0, 7)),
    bug("DescriptorOfTheNextColumns", "wgmma_m64n128k16<Major::MN>(o[piece], p[4 * k16]", add, 1),
    bug("DescriptorWithoutSwizzle", "wgmma_m64n128k16<Major::K, Major::MN>(o[piece]", add,
        std::int64_t{1} << 62),
    saying("wait as \"consumer\"",
           bug("NoArrivalOfQueries", "shared.q_full()[group].arrive_cp_async();", drop)),
    bug("ProbabilitiesElsewhere", "stmatrix_x4(fragment_address(chunk, warp, lane, k16)", add, 16),
    saying("result: out", bug("NoProbabilities", "stmatrix_x4(fragment_address(", drop)),
};

// It serves while a kernel is written. Processor time: other programs do not count.
TEST(SimulatorForwardSpeed, ASmallCaseTakesLessThanASecond) {
  const std::clock_t begin = std::clock();
  simulator::expect_passes(forward_operation(), "bf16-h64-k128", "late");
  const double seconds = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
#ifdef NDEBUG
  EXPECT_LT(seconds, 1);
#endif
  RecordProperty("seconds", std::to_string(seconds));
}

// What a report of a wrong result says of the element: who wrote it, where, and for what it had
// last waited.
TEST(SimulatorForwardReport, SaysWhoWroteTheElement) {
  const auto planted =
      std::find_if(kThoroughBugs.begin(), kThoroughBugs.end(),
                   [](const PlantedBug& of) { return of.name == "NoProbabilities"; });
  ASSERT_NE(planted, kThoroughBugs.end());
  simulator::plant(planted->plant, WINNOW_SOURCE_DIR);
  const simulator::Simulated simulated =
      simulator::simulate(forward_operation(), planted->of_case, simulator::parse_schedule("eager"),
                          planted->multiprocessors, true);
  simulator::unplant();
  EXPECT_THAT(simulated.report,
              ::testing::MatchesRegex(
                  "result: out(.|\n)*\n  the element was last written by "
                  "thread [0-9]+ \\(warp [0-9]+\\) of block .* in launch "
                  "[0-9]+ \\(forward_kernel\\), at [a-z_0-9]+.cuh:[0-9]+, whose last wait was as "
                  "\"[a-z ]+\" [0-9]+"));
}

// On five multiprocessors the last of eleven items has three parts, one of them in the middle. On
// two it has fewer.
TEST(SimulatorForwardParts, GoFromBlockToBlock) {
  simulator::expect_passes(forward_operation(), {"bf16-parts-ragged", {"random:8"}, 5});
}
TEST(ThoroughForwardParts, GoFromBlockToBlock) {
  simulator::expect_passes(forward_operation(), {"bf16-parts-ragged", {"eager", "late"}, 5});
  simulator::expect_passes(forward_operation(), {"bf16-parts-ragged", {"random:7"}, 2});
}

WINNOW_SIMULATOR_TESTS(SimulatorForward, forward_operation(), kQuickCases, kThoroughCases,
                       kQuickBugs, kThoroughBugs);

}  // namespace
}  // namespace winnow::sparse_mla
