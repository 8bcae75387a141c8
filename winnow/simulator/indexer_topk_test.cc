// indexer::topk of sm90 in the simulator. A case runs the kernel of the dense scores too, whose
// bits the choice is compared with. Cases with infinite scores are left out: a GPU gives one NaN,
// the host's arithmetic gives others.
#include "winnow/simulator/indexer_simulation.h"

namespace winnow::indexer {

testing::Operation topk_operation();

namespace {

const std::vector<PassingCase> kQuickCases = {
    {"bf16-h64", {"eager", "late", "random:1", "starved:8", "starved:12"}},
    {"f8_e4m3-h128", kFew},
    {"bf16-h20", {"random:2"}},  // padded heads
    {"bf16-d64-h16", {"late"}},
    {"bf16-all-rules", {"random:3"}},
    {"f8_e4m3-sk127", {"random:4"}},
    {"f8_e4m3-sq1-sk33000-k1100", {"late"}, 8},   // a cluster of blocks chooses
    {"f8_e4m3-sq2-sk33000-k1100", {"eager"}, 8},  // ranges of rows; four blocks merge
    {"bf16-equal-larger", {"late"}},              // equal scores, of which the last ones are chosen
    {"f8_e4m3-sk16385-k1000", {"late"}},          // the largest blocks of the choice
    {"bf16-h64-sk33000-equal-from3000", {"late"}},  // more candidates than the buffer holds
    {"f8_e4m3-h64-plateau", {"late"}},              // zeros where two parts of a sum cancel
    {"f8_e4m3-h64-huge-weights", {"late"}},  // sums that are not split, beside others that are
};
const std::vector<PassingCase> kThoroughCases = joined({
    under(kMany, "bf16-h1", "bf16-h20", "bf16-h32", "bf16-h64", "bf16-h96", "bf16-h128",
          "f8_e4m3-h16", "f8_e4m3-h64", "f8_e4m3-h128", "bf16-d64-h64", "f8_e4m3-d64-h16",
          "bf16-k512", "bf16-sk0", "bf16-sk1", "bf16-ranges-ragged", "bf16-ranges-empty",
          "bf16-ranges-out-of-range", "bf16-stride4-from700", "f8_e4m3-all-rules", "bf16-wide",
          "bf16-weights-bf16", "bf16-nan", "f8_e4m3-zero-larger", "bf16-duplicates",
          "f8_e4m3-h64-plateau-larger", "f8_e4m3-h128-plateau"),
    under(kFew, "bf16-h64-plateau", "f8_e4m3-h16-plateau", "f8_e4m3-h33-plateau-larger",
          "f8_e4m3-h64-last-head", "f8_e4m3-h128-nan", "f8_e4m3-h128-huge-weights",
          "f8_e4m3-h64-zero", "f8_e4m3-sq1-sk20000-k2048", "f8_e4m3-sk4096-k1000",
          "f8_e4m3-sk4097-k1000", "bf16-sk8192-k1000", "f8_e4m3-sk16384-k1000",
          "f8_e4m3-sk32768-k1000", "bf16-sk16385-k1000", "bf16-sk32769-k1000",
          "bf16-sq1-sk8191-k2048", "bf16-sk9001-ragged", "bf16-h16-sk12000-duplicates-larger",
          "f8_e4m3-h16-sk12000-nan", "bf16-h16-sk33000-zero",
          "f8_e4m3-h16-sk33000-duplicates-larger", "f8_e4m3-h64-sk33000-duplicates"),
    {{"f8_e4m3-sq2-sk33000-k1100", {"late", "random:2", "starved:9"}, 8},
     {"f8_e4m3-sq1-sk40000-k2048", {"eager", "late", "random:2", "starved:9"}, 8},
     {"bf16-sq1-sk40000-k2048", {"late", "random:3"}},
     {"bf16-h64-sk33000-equal", {"late"}}},
});

// Two items of three tiles for the first block; the ring of keys is used again.
const BugsOf tiles{"score_tiles_sm90.cuh", "bf16-h128"}, f8{"score_tiles_sm90.cuh", "f8_e4m3-h128"};
// 40 tiles: the ring of scores is used again, and counts that are one too small end phases too
// early.
const BugsOf long_tiles{"score_tiles_sm90.cuh", "bf16-zero"};
// 258 tiles, of which candidates are kept.
const BugsOf sink{"topk_sm90.cuh", "bf16-h16-sk33000-zero"};
const BugsOf candidates{"select_sm90.cuh", "f8_e4m3-sq2-sk33000-k1100", 8};
// Two digits of histograms, then a third one, and equal keys.
const BugsOf choice{"choose.cuh", "bf16-duplicates"};

const BugsOf linear{"linear_part_sm90.cuh", "f8_e4m3-h128"};
const BugsOf zeros{"linear_part_sm90.cuh", "f8_e4m3-h64-plateau"};
const BugsOf scales{"score_tiles_sm90.cuh", "f8_e4m3-h16-sk33000-zero"};

// Clusters of four blocks merge.
const BugsOf merge{"merge_sm90.cuh", "f8_e4m3-sq2-sk33000-k1100", 8};

const BugsOf many_items{"score_tiles_sm90.cuh", kManyItems};

const std::vector<PlantedBug> kQuickBugs = {
    tiles("NoWaitForEmptyStage", "shared.empty()[ring.stage].wait", drop),
    tiles("NoWaitForHeads", "shared.heads_full()[side].wait", drop),
    in_one_schedule(
        beyond_a_pair(merge("BinsOfTwoBlocks", "other[i] = device::ld_shared_cluster(", drop))),
    in_one_schedule(
        race(merge("MergeBeforeTheCandidates", "device::wait_for_kernel_before();", drop))),
    in_one_schedule(race(choice("ChoiceBeforeTheScores", "device::wait_for_kernel_before(", drop))),
    in_one_schedule(long_tiles("CountOfEmptyTooSmall", "shared.empty()[i].init", add, -1)),
    in_one_schedule(race(candidates("BinsOfRangesByPlainStores", "atomicAdd(bins + (", weaken))),
    in_one_schedule(
        race(merge("BinsOfTheMergeByPlainStores", "if (there && distance <= high", weaken))),
    in_one_schedule(race(choice("BinsByPlainStores", "atomicAdd(shared_.bins[0] + (key", weaken))),
    // A head without weight keeps its positive products.
    in_one_schedule(zeros("HeadsWithoutWeight", "device::st_shared(at, word);", drop)),
};
const std::vector<PlantedBug> kThoroughBugs = {
    tiles("SwappedPhaseOfStages", "shared.empty()[ring.stage].wait", add, 1),
    tiles("NoWaitForFreeHeads", "shared.heads_empty()[side].wait", drop),
    tiles("SwappedPhaseOfHeads", "shared.heads_full()[side].wait", add, 1),
    tiles("NoWaitForFirstKeys", "void score_tiles() {", drop, 0, 1),
    f8("NoWaitForFirstKeysF8", "void score_tiles() {", drop, 0, 1),
    long_tiles("NoWaitForNextKeys", "weigh<kWhole>(product[0], halves);", drop, 0, 2),
    tiles("TooFewBytesOfKeys", "shared.full()[ring.stage].arrive_expect", add, -16),
    tiles("TooManyBytesOfKeys", "shared.full()[ring.stage].arrive_expect", add, 16),
    tiles("TooFewBytesOfHeads", "shared.heads_full()[side].arrive_expect", add, -16),
    tiles("NoCopyOfKeys", "tensor_load(shared.keys()[ring.stage]", drop),
    tiles("KeysElsewhere", "tensor_load(shared.keys()[ring.stage]", add, 1024),
    tiles("NoSyncOfWeights", "__syncwarp();", drop),
    long_tiles("NoWaitForFreeScores", "shared.free()[out.stage].wait", drop),
    sink("NoWaitForScores", "shared.ready()[ring.stage].wait", drop),
    sink("SwappedPhaseOfScores", "shared.ready()[ring.stage].wait", add, 1),
    sink("NoArrivalOfFreeScores", "shared.free()[ring.stage].arrive_warp", drop),
    tiles("NoWaitForLastProduct", "device::wgmma_wait<0>();", drop),
    tiles("WaitForTooFewGroups", "slot = out.stage;", add, 1, 3),
    tiles("NoArrivalOfEmpty", "shared.empty()[stage].arrive_warp", drop),
    tiles("NoArrivalOfReady", "shared.ready()[slot].arrive_warp", drop),
    tiles("NoArrivalOfFreeHeads", "shared.heads_empty()[side].arrive_warp", drop),
    tiles("CountOfFullTooLarge", "shared.full()[i].init", add, 1),
    tiles("CountOfReadyTooSmall", "shared.ready()[i].init", add, -1),
    long_tiles("CountOfFreeTooSmall", "shared.free()[i].init", add, -1),
    many_items("CountOfHeadsEmptyTooSmall", "shared.heads_empty()[side].init", add, -1),
    tiles("NoInitFence", "fence_mbarrier_init();", drop),
    tiles("NoBarrierAfterInit", "  __syncthreads();", drop),
    tiles("NoCommit", "device::wgmma_commit();", drop),
    tiles("NoProductFence", "device::wgmma_fence();", drop),
    tiles("DescriptorOfTheNextColumns", "wgmma_m64n128k16<device::Major::K", add, 2),
    tiles("DescriptorOfAnotherStride", "wgmma_m64n128k16<device::Major::K", add,
          std::int64_t{1} << 32),
    choice("NoBarrierOfEmptyBins", "int round = 0;", drop, 0, 2),
    choice("NoBarrierOfCountedBins", "static void sync() {", drop, 0, 4),
    choice("NoBarrierOfSums", "shared_.of_warp[warp()] = static_cast<std::uint32_t>(", drop, 0, 1),
    choice("NoBarrierOfTheBin", "  wanted -= shared_.higher;", drop, 0, -1),
    choice("NoBarrierOfChosen", "shared_.equal_of_warp[warp()] = own_equal;", drop, 0, 2),
    in_one_schedule(
        beyond_a_pair(merge("CountsOfTwoBlocks", "words = device::ld_shared_cluster(", drop))),
    merge("NoBarrierOfTheCluster", "void sync() const {", drop, 0, 4),
    merge("WordsOfBlocksBeforeTheyAreThere", "if (thread() == 0) shown = mine;", drop, 0, 1),
    merge("BinsOfAnotherBlock", "device::map_shared(address, static_cast<std::uint32_t>(rank)));",
          add, 1),
    merge("BlockEndsTooEarly", "device::cluster_wait();", drop),
    scales("NoWaitForFreeScales", "shared.free()[slot.stage].wait", drop),
    scales("NoArrivalOfScales", "shared.ready()[slot.stage].arrive_warp", drop),
    linear("NoFenceOfTerms", "device::fence_proxy_async_shared();", drop),
    f8("NoBarrierOfTerms", "device::bar_sync<128>(1 + side);", drop),
    f8("DescriptorWithoutSwizzle", "wgmma_f8_negated(product", add, std::int64_t{3} << 62),
};

WINNOW_SIMULATOR_TESTS(SimulatorTopk, topk_operation(), kQuickCases, kThoroughCases, kQuickBugs,
                       kThoroughBugs);

}  // namespace
}  // namespace winnow::indexer
