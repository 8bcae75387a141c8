// sparse_mla::backward of sm90 in the simulator: the split design, which takes more than 64 heads.
#include "winnow/simulator/kernels/sparse_mla_simulation.h"
#include "winnow/sparse_mla/cases.h"

namespace winnow::sparse_mla {

testing::Operation backward_operation();

namespace {

const std::vector<std::string> kFew = schedules(1, {8});
const std::vector<std::string> kMany = schedules(4, {0, 4, 8, 11});

const std::vector<PassingCase> kQuickCases = {
    {"bf16-h128", {"eager", "late", "random:1"}},
    {"bf16-h192", {"random:2"}},
    {"bf16-sink-mixed", {"random:3"}},
    {"bf16-sink-mixed-deterministic", kFew},
    {"bf16-skv25000-h128", {"random:4"}},
    {"bf16-h70-k600-deterministic", {"late"}},
    {"bf16-extra-list-list-all-rules", {"random:5"}},
};
const std::vector<PassingCase> kThoroughCases = joined({
    under(kMany, "bf16-h96", "bf16-h128", "bf16-h192", "bf16-skv25000-h128",
          "bf16-sink-mixed-all-options", "bf16-sink-mixed-nan-in-dead",
          "bf16-sink-mixed-nan-in-dead-deterministic"),
    under(kFew, "bf16-skv25000-h128-deterministic", "bf16-extra-list-list-all-rules",
          "bf16-extra-skv25000-h128", "bf16-extra-skv25000-h128-deterministic"),
    {{"bf16-h128-k2048", {"late", "random:5"}}},
});

// A few queries of two blocks of heads.
const BugsOf scores_bug{"backward_split_sm90.cuh", "bf16-sink-mixed-deterministic"};
const BugsOf product_bug{"backward_split_products_sm90.cuh", "bf16-sink-mixed-deterministic"};
// 32 tiles: every ring is used again and again.
const BugsOf long_scores{"backward_split_sm90.cuh", "bf16-h128-k2048"};
const BugsOf long_product{"backward_split_products_sm90.cuh", "bf16-h128-k2048"};
const BugsOf many_tiles{"backward_split_products_sm90.cuh", "bf16-h70-k600-deterministic"};
// Several items a block: where one ends an arrival too early, a few later the heads are read when
// they are written.
const BugsOf many_items{"backward_split_products_sm90.cuh", "bf16-h192"};

// The sums of dkv, in f32 and in integers.
const BugsOf long_drain{"backward_split_drain_sm90.cuh", "bf16-h128"};
const BugsOf fixed_drain{"backward_split_drain_sm90.cuh", "bf16-sink-mixed-deterministic"};

const std::vector<PlantedBug> kQuickBugs = {
    saying("proxy fence: ", scores_bug("NoProxyFence", "fence_proxy_async_shared();", drop)),
    scores_bug("ScoresNoWaitForRows", "ring.parity, \"multiply\"", drop),
    product_bug("DqNoWaitForRows", "shared.full()[ring.stage].wait", drop),
    saying("deadlock: ", product_bug("DqNoImages", "bulk_load(stage.ds()[b].address", drop)),
    product_bug("TooFewBytesOfImages", "full.arrive_expect(kChunkBytes);", add, -16),
    product_bug("DkvNoWaitForHeads", "shared.heads_full()[block][kWhich].wait", drop),
    in_one_schedule(
        race(long_drain("PlainSumsOfDkv", "reduce_add(to[r][0] + column, a, policy)", weaken))),
    in_one_schedule(
        race(fixed_drain("FixedPlainSums", "reduce_add(to[r][k] + column / 2", weaken))),
    in_one_schedule(race(fixed_drain("PlainCounts", "atomicAdd(p.row_counts + row, 1u);", weaken))),
    in_one_schedule(
        race(many_items("ItemsTakenByPlainStores", "atomicAdd(p_.dkv_taken, 1u)", weaken))),
    in_one_schedule(
        race(fixed_drain("PlainBounds", "atomicMax(p.row_bounds + row, bits)", weaken))),
    in_one_schedule(scores_bug("ScoresCountOfEmptyTooSmall", "shared.empty()[slot].init", add, -1)),
    in_one_schedule(many_tiles("DqCountOfEmptyTooSmall", "shared.empty()[slot].init", add, -1)),
    in_one_schedule(
        many_items("DkvCountOfFreeHeads", "shared.heads_free()[i][which].init", add, -1)),
};
const std::vector<PlantedBug> kThoroughBugs = {
    // The scores.
    scores_bug("ScoresNoWaitForStage", "ring.parity ^ 1, \"gather\"", drop),
    scores_bug("ScoresNoWaitForHeads", "ring.parity, \"heads\"", drop),
    scores_bug("ScoresSwappedPhase", "ring.parity, \"multiply\"", add, 1),
    scores_bug("ScoresNoWaitForP", "shared.p_ready()[buffer].wait", drop),
    long_scores("ScoresNoWaitForStoreOfP", "bulk_wait_read<1>();  // the store", drop),
    long_scores("ScoresTooFewGroupsOfStores", "bulk_wait_read<1>();  // the store", add, 1),
    scores_bug("ScoresEndBeforeStores", "bulk_store(image_pair(p, item.query", drop, 0, 6),
    scores_bug("ScoresEarlyRelease", "      wgmma_wait<1>();", drop),
    scores_bug("ScoresNoWaitForLogits", "  wgmma_wait<0>();", drop),
    scores_bug("ScoresCountOfFull", "shared.full()[slot].init", add, -1),
    scores_bug("ScoresCountOfPReady", "shared.p_ready()[i].init", add, -1),
    long_scores("ScoresCountOfPFreeTooLarge", "shared.p_free()[i].init", add, 1),
    scores_bug("ScoresNoInitFence", "fence_mbarrier_init();", drop),
    scores_bug("ScoresNoBarrierAfterInit", "fence_mbarrier_init();", drop, 0, 2),
    scores_bug("ScoresDescriptor", "wgmma_m64n64k16<Major::K>(d, a[step][0]", add, 2),
    // dq.
    long_product("DqNoWaitForStage", "ring.parity ^ 1, \"gather\"", drop),
    product_bug("DqSwappedPhase", "shared.full()[ring.stage].wait", add, 1),
    product_bug("DqTooFewBytes", "full.arrive_expect(item.blocks", add, -16),
    product_bug("DqTooManyBytes", "full.arrive_expect(item.blocks", add, 16),
    product_bug("DqImagesElsewhere", "bulk_load(stage.ds()[b].address", add, 128),
    long_product("DqEarlyRelease", "      wgmma_wait<1>();", drop),
    product_bug("DqNoWaitForSums", "if (tiles > 0) shared.empty()", drop, 0, -3),
    product_bug("DqCountOfFull", "shared.full()[slot].init", add, -1),
    product_bug("DqNoInitFence", "shared.empty()[slot].init", drop, 0, 2),
    product_bug("DqNoBarrierAfterInit", "shared.empty()[slot].init", drop, 0, 4),
    product_bug("DqDescriptor", "wgmma_m64n256k16<Major::K, Major::MN>(sums.main, a", add, 8),
    // dkv.
    long_product("DkvNoWaitForSlot", "ring.parity ^ 1, \"images\",", drop),
    product_bug("DkvSwappedPhaseOfSlots", "ring.parity ^ 1, \"images\",", add, 1),
    product_bug("DkvNoWaitForFreeDOut", "heads_free()[b][kDOutOfHeads].wait", drop),
    product_bug("DkvNoWaitForFreeQ", "heads_free()[b][kQOfHeads].wait", drop),
    product_bug("DkvNoWaitForP", "Adds one block's P^T d_out", drop, 0, 10),
    product_bug("DkvNoWaitForDs", "Adds one block's P^T d_out", drop, 0, 30),
    long_product("DkvEarlyRelease", "Adds one block's P^T d_out", drop, 0, 46),
    product_bug("DkvNoWaitForSums", "if constexpr (kChunks > kSliceChunks) wgmma_pin(sums.last);",
                drop, 0, -2),
    product_bug("DkvCountOfHeads", "shared.heads_full()[i][which].init", add, -1),
    long_product("DkvCountOfSlotsTooLarge", "shared.empty()[i][slot].init", add, 1),
    product_bug("DkvNoFence", "Adds one block's P^T d_out", drop, 0, 14),
    product_bug("DkvNoInitFence", "shared.item_empty()[i].init", drop, 0, 2),
    product_bug("DkvNoBarrierAfterInit", "shared.item_empty()[i].init", drop, 0, 4),
    product_bug("DkvNoWaitForItem", "shared_.item_full()[ring_.stage].wait", drop),
    many_items("DkvNoWaitForReaders", "shared_.item_empty()[ring_.stage].wait", drop),
    many_items("DkvCountOfReaders", "shared.item_empty()[i].init", add, -1),
};

WINNOW_SIMULATOR_TESTS(SimulatorBackwardSplit, backward_operation(), kQuickCases, kThoroughCases,
                       kQuickBugs, kThoroughBugs);

}  // namespace
}  // namespace winnow::sparse_mla
