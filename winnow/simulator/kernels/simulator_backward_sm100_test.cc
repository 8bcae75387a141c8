// sparse_mla::backward of sm100 in the simulator: every kernel of the backend, on a simulated
// Blackwell.
#include "winnow/simulator/testing/simulate.h"
#include "winnow/sparse_mla/cases.h"

namespace winnow::sparse_mla {

testing::Operation backward_operation(std::int64_t most_queries);

namespace {

using simulator::PassingCase;
using simulator::Plant;
using simulator::PlantedBug;
using enum Plant::Action;

// Before anybody asks which GPU there is.
const bool kBlackwell = [] {
  simulator::settings().compute_capability = 100;
  return true;
}();

// The case table with at most 12 queries, on the backend that nobody gets unasked.
testing::Operation forced_operation() {
  testing::Operation operation = backward_operation(12);
  for (testing::Case& one : operation.cases) {
    one.run = [run = one.run](testing::Target target) {
      target.options.backend = Backend::sm100;
      testing::CaseOutcome outcome = run(target);
      EXPECT_EQ(outcome.backend, Backend::sm100);
      return outcome;
    };
  }
  return operation;
}

const std::vector<std::string> kFew = {"eager", "late", "random:1", "starved:12"};
const std::vector<std::string> kMany = {"eager",     "late",       "random:1",  "random:2",
                                        "random:3",  "starved:0",  "starved:1", "starved:2",
                                        "starved:4", "starved:12", "starved:16"};

const std::vector<PassingCase> kQuickCases = {
    {"bf16-d512-h16-k100", kFew},
    {"bf16-h128", {"late", "random:1"}},
    {"bf16-h192", {"random:2"}},
    {"bf16-h70-k600", {"late"}},
    {"bf16-h16-k600-deterministic", {"random:1"}},
    {"bf16-reversed", {"late"}},
    {"bf16-d512-h16-k100-deterministic", {"random:3"}},
    {"bf16-all-rules-all-options", {"late"}},
    {"bf16-sink-mixed-nan-in-dead", {"random:4"}},
};
// Every case of bf16, in schedules of each kind; two of many tiles in all.
const std::vector<PassingCase> kThoroughCases = [] {
  std::vector<PassingCase> all;
  for (const testing::Case& one : backward_operation(12).cases) {
    if (!one.on_gpu || one.only_gpu || one.not_on == Backend::sm100) continue;
    const bool often = one.name == "bf16-h192" || one.name == "bf16-all-rules-deterministic";
    all.push_back({one.name, often ? kMany : kFew});
  }
  return all;
}();

const std::vector<std::string> kBugSchedules = {"eager", "late", "random:1"};

PlantedBug bug(const char* of_case, const char* file, const char* name, const char* text,
               Plant::Action action, std::int64_t addend, int below) {
  return {name,
          of_case,
          {.file = file, .text = text, .action = action, .addend = addend, .below = below},
          kBugSchedules};
}
// Four queries of one tile of a pair, of eight stages: the ring and the sums are used again.
PlantedBug scores_bug(const char* name, const char* text, Plant::Action action,
                      std::int64_t addend = 0, int below = 0) {
  return bug("bf16-d512-h16-k100", "backward_sm100.cuh", name, text, action, addend, below);
}
// The same of many tiles, whose sums are drained while the next are formed.
PlantedBug tiles_bug(const char* name, const char* text, Plant::Action action,
                     std::int64_t addend = 0, int below = 0) {
  return bug("bf16-h128-k2048", "backward_sm100.cuh", name, text, action, addend, below);
}
PlantedBug product_bug(const char* name, const char* text, Plant::Action action,
                       std::int64_t addend = 0, int below = 0) {
  return bug("bf16-h192", "backward_products_sm100.cuh", name, text, action, addend, below);
}

// Of what pairs do side by side.
PlantedBug of_two_pairs(PlantedBug planted) {
  planted.multiprocessors = 4;
  return planted;
}

const std::vector<PlantedBug> kQuickBugs = {
    // Faults of the sketch that this backend was made from: half of the bytes are expected, nobody
    // waits for Q, and a block ends while the other may still reach into it.
    scores_bug("HalfOfTheBytes", "full()[ring.stage].arrive_expect(2 * Plan::kStageBytes);", add,
               -16384),
    scores_bug("NobodyWaitsForQ", "shared.heads_ready().wait_cluster", drop),
    scores_bug("NoClosingClusterBarrier", "void close_tensor_memory(", drop, 0, 2),
    // Two of each of the other kernels.
    product_bug("DqNoWaitForStage", "ring.parity ^ 1, \"load\"", drop),
    product_bug("DqDescriptor", "tcgen05_mma<2>(sums + part * kDqPart", add, 8),
    product_bug("DkvNoWaitForHeads", "full.wait(count % 2", drop),
    product_bug("DkvNoWaitForProducts", "count / 2 % 2, \"drain\"", drop),
    in_one_schedule(
        race(of_two_pairs(bug("bf16-h192", "backward_split_drain_sm90.cuh", "PlainSumsOfDkv",
                              "reduce_add(to[r][0] + column, a, policy)", weaken, 0, 0)))),
    in_one_schedule(race(
        of_two_pairs(bug("bf16-d512-h16-k100-deterministic", "backward_split_drain_sm90.cuh",
                         "FixedPlainSums", "reduce_add(to[r][k] + column / 2", weaken, 0, 0)))),
    in_one_schedule(race(
        of_two_pairs(bug("bf16-d512-h16-k100-deterministic", "backward_split_drain_sm90.cuh",
                         "PlainBounds", "atomicMax(p.row_bounds + row, bits)", weaken, 0, 0)))),
};
const std::vector<PlantedBug> kThoroughBugs = {
    scores_bug("NoTensorMemory", "tcgen05_alloc<2>(slot", drop),
    scores_bug("NoDealloc", "tcgen05_dealloc<2>(columns", drop),
    scores_bug("TooFewColumns", "tcgen05_alloc<2>(slot", add, -256),
    scores_bug("NoOpeningClusterBarrier", "std::uint32_t open_tensor_memory(", drop, 0, 6),
    scores_bug("NoInitFence", "    fence_mbarrier_init();", drop),
    scores_bug("RingEndIsNotAwaited", "\"ring end\"", drop),
    scores_bug("NoWaitForStage", "ring.parity ^ 1, \"load\"", drop),
    scores_bug("SwappedPhaseOfStages", "ring.parity ^ 1, \"load\"", add, 1),
    scores_bug("NoGather", "tensor_gather4_pair(shared.ring()", drop),
    scores_bug("NoWaitForRows", "ring.parity, \"multiply\"", drop),
    scores_bug("SwappedPhaseOfRows", "ring.parity, \"multiply\"", add, 1),
    scores_bug("NoWaitForFreeHeads", "count % 2 ^ 1, \"heads\", 0", drop),
    scores_bug("HeadsEndIsNotAwaited", "\"heads end\"", drop),
    scores_bug("TooFewBytesOfHeads", "full.arrive_expect((Plan::kChunks", add, -128),
    scores_bug("NoWaitForOwnHeads", "full.wait(count % 2, \"heads\", 1)", drop),
    scores_bug("OtherBlockIsNotReady", "shared.heads_ready().arrive_cluster(0);", drop),
    tiles_bug("NoWaitForFreeSums", "count / 2 % 2 ^ 1, \"sums\", buffer", drop),
    scores_bug("DescriptorOfQ", "rows + 2 * k16, q + 2 * k16", add, 2),
    scores_bug("DescriptorVersion", "rows + 2 * k16, q + 2 * k16", add, std::int64_t{1} << 46),
    scores_bug("SwizzleOfDOut", "rows + 2 * k16, d_out + 2 * k16", add, std::int64_t{1} << 61),
    scores_bug("StageIsNotReleased", "tcgen05_commit_multicast<2>(shared.empty()", drop),
    scores_bug("SumsAreNotTold", "tcgen05_commit_multicast<2>(shared.sums_full()", drop),
    scores_bug("NoWaitForDOut", "items % 2, \"delta\"", drop),
    scores_bug("NoWaitForStats", "items % 2, \"stats\"", drop),
    scores_bug("DeltaForOneBlock", "st_shared_cluster(map_shared(at, r)", drop),
    scores_bug("NoWaitForSums", "count / 2 % 2, \"weigh\"", drop),
    scores_bug("NoFenceBehindSums", "count / 2 % 2, \"weigh\"", drop, 0, 1),
    scores_bug("NoWaitForLoads", "      tcgen05_wait_ld();", drop, 0, 0),
    scores_bug("LanesOfAnotherWarp", "tcgen05_ld_32x32b(at, s);", add, 32 << 16),
    scores_bug("NoFenceBeforeFreeSums", "shared.sums_free()[buffer].arrive_warp_cluster", drop, 0,
               -1),
    scores_bug("SumsAreNotFreed", "shared.sums_free()[buffer].arrive_warp_cluster", drop),
    tiles_bug("CountOfFreeSums", "shared.sums_free()[i].init", add, -1),
    tiles_bug("CountOfStats", "shared.stats_ready().init", add, -1),
    scores_bug("CountOfHeadsReady", "shared.heads_ready().init", add, -1),
    // dq.
    product_bug("DqTooFewBytes", "full.arrive_expect(2 * Plan::kStageBytes)", add, -16),
    product_bug("DqGatherElsewhere", "tensor_gather4_pair(stage.rows()[chunk]", add, 128),
    product_bug("DqNoImages", "tensor_load_pair(stage.ds()", drop),
    product_bug("DqNoWaitForSums", "items % 2 ^ 1, \"sums\"", drop),
    product_bug("DqNoWaitForRows", "items % 2 ^ 1, \"sums\"", drop, 0, 4),
    product_bug("DqNarrowSwizzle", "tcgen05_mma<2>(sums + kDqNarrow", add,
                -(std::int64_t{2} << 61)),
    product_bug("DqNoWaitForProducts", "items % 2, \"drain\"", drop),
    product_bug("DqNoFenceBehindProducts", "items % 2, \"drain\"", drop, 0, 1),
    product_bug("DqNoWaitForLoads", "tcgen05_ld_32x32b(sums + lanes", drop, 0, 1),
    product_bug("DqCountOfFreeSums", "shared.sums_free().init(2", add, -1),
    // dkv.
    product_bug("DkvNoWaitForSlot", "ring.parity ^ 1, \"images\"", drop),
    // Found by the schedule in which the odd block's loading warp comes last.
    {"DkvOddBlockDoesNotArrive",
     "bf16-d512-h16-k100",
     {.file = "backward_products_sm100.cuh",
      .text = "shared.full()[slot].init(2)",
      .action = add,
      .addend = -1},
     {"eager", "late", "starved:12"}},
    product_bug("DkvTooFewBytes", "full.arrive_expect((mine", add, -8192),
    product_bug("DkvNoWaitForFreeHeads", "count % 2 ^ 1, \"heads\", 0", drop),
    product_bug("DkvHeadsAreNotReady", "shared.heads_ready().arrive_warp_cluster", drop),
    product_bug("DkvNoWaitForReadyHeads", "shared.heads_ready().wait_cluster", drop),
    product_bug("DkvNoWaitForFreeSums", "\"sums\", half", drop),
    product_bug("DkvNoFenceBehindFreeSums", "\"sums\", half", drop, 0, 1),
    product_bug("DkvDescriptor", "tcgen05_mma<2>(sums, images + 2 * k16", add, 64),
    product_bug("DkvNoFenceBehindProducts", "count / 2 % 2, \"drain\"", drop, 0, 1),
    product_bug("DkvCountOfFreeSums", "shared.sums_free()[i].init", add, -1),
    saying("result: dkv",
           bug("bf16-sink-mixed-nan-in-dead", "backward_products_sm100.cuh", "DkvDeadHeadsStay",
               "st_shared(shared.q()[block][lane / 8]", drop, 0, 0)),
    saying("result: dkv",
           bug("bf16-sink-mixed-nan-in-dead", "backward_products_sm100.cuh", "DkvDeadGradientsStay",
               "st_shared(shared.d_out()[block][lane / 8]", drop, 0, 0)),
    saying("result: dkv",
           bug("bf16-sink-mixed-nan-in-dead", "backward_products_sm100.cuh", "DkvDeadRopeStays",
               "st_shared(shared.narrow_q()[block]", drop, 0, 0)),
    saying("proxy fence: ", bug("bf16-sink-mixed", "backward_products_sm100.cuh", "DkvNoProxyFence",
                                "  fence_proxy_async_shared();", drop, 0, 0)),
};

WINNOW_SIMULATOR_TESTS(SimulatorBackwardSm100, forced_operation(), kQuickCases, kThoroughCases,
                       kQuickBugs, kThoroughBugs);

}  // namespace
}  // namespace winnow::sparse_mla
