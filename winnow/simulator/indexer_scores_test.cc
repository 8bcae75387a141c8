// indexer::scores of sm90 in the simulator: a case runs the kernel of dense scores, its other form
// that begins with each query's first row, and the one of scores at indices
// (indexer_scores_at_test.cc has bugs of that). The dense kernel's tiles are
// those of topk, and so are most of the bugs in them (indexer_topk_test.cc).
#include "winnow/simulator/indexer_simulation.h"

namespace winnow::indexer {

testing::Operation scores_operation();

namespace {

const std::vector<PassingCase> kQuickCases = {
    {"bf16-h64", {"eager", "late", "random:1", "starved:2", "starved:12"}},
    {"f8_e4m3-h128", kFew},
    {"bf16-h96", {"random:2"}},
    {"f8_e4m3-d64-h16", {"late"}},
    {"bf16-stride4-from700", {"random:3"}},
    {"bf16-infinite", {"random:1"}},
    {"bf16-k512", {"random:4"}},
    {"f8_e4m3-h128-plateau", {"random:5"}},
    {"f8_e4m3-h64-last-head", {"late"}},  // no positive product where a warp looks first
    {"f8_e4m3-h64-nan", {"late"}},
};
const std::vector<PassingCase> kThoroughCases = joined({
    under(kMany, "bf16-h1", "bf16-h20", "bf16-h64", "bf16-h96", "bf16-h128", "f8_e4m3-h3",
          "f8_e4m3-h128", "bf16-d64-h16", "bf16-d64-h64", "f8_e4m3-d64-h64", "bf16-k1",
          "f8_e4m3-k512", "bf16-sk0", "bf16-sk127", "bf16-ranges-ragged", "bf16-ranges-empty",
          "f8_e4m3-stride4-from700", "bf16-wide", "bf16-nan", "f8_e4m3-h64-plateau"),
    under(kFew, "bf16-h64-plateau", "f8_e4m3-h33-plateau", "f8_e4m3-h64-zero",
          "f8_e4m3-h33-last-head", "f8_e4m3-h128-last-head", "f8_e4m3-h64-huge-weights"),
});

const BugsOf tiles{"score_tiles_sm90.cuh", "bf16-h128"}, sink{"scores_sm90.cuh", "bf16-zero"};
// Rows whose last head alone has a positive product.
const BugsOf last_head{"linear_part_sm90.cuh", "f8_e4m3-h64-last-head"};
// Scores from each query's first row on: six tiles, of which some are seen in part.
const BugsOf from_start{"scores_sm90.cuh", "bf16-h64-plateau"},
    read_apart{"score_tiles_sm90.cuh", "bf16-h64-plateau"},
    scales_apart{"score_tiles_sm90.cuh", "f8_e4m3-h64-plateau"},
    first_rows{"seen_rows.cuh", "bf16-stride4-from2"};
constexpr const char* kWhole = "scores[column + 32 * e + lane] = score[e];";
constexpr const char* kEdge = "scores[place] = score[e];";
const BugsOf long_tiles{"score_tiles_sm90.cuh", "bf16-zero"};
const BugsOf unseen{"seen_rows.cuh", "bf16-stride4-from2"},
    odd_unseen{"seen_rows.cuh", "bf16-ranges-empty"};

const std::vector<PlantedBug> kQuickBugs = {
    sink("NoWaitForScores", "shared.ready()[ring.stage].wait", drop),
    tiles("NoWaitForFirstKeys", "void score_tiles() {", drop, 0, 1),
    in_one_schedule(long_tiles("CountOfEmptyTooSmall", "shared.empty()[i].init", add, -1)),
    in_one_schedule(last_head("SignsOfOtherLanes", "found |= __reduce_or_sync(", drop)),
    in_one_schedule(unseen("UnseenRowsNotStored", "make_float4(unseen, unseen,", undo)),
    in_one_schedule(odd_unseen("LastUnseenRowsNotStored", "scores[e] = device::neg", undo)),
    from_start.undo("ScoresFromStartNotStored", kWhole),
    first_rows.undo("FirstColumnsBehindNotStored", "if (part == 0 && behind + lane < even)"),
};
const std::vector<PlantedBug> kThoroughBugs = {
    sink("SwappedPhaseOfScores", "shared.ready()[ring.stage].wait", add, 1),
    sink("NoArrivalOfFreeScores", "shared.free()[ring.stage].arrive_warp", drop),
    tiles("NoWaitForEmptyStage", "shared.empty()[ring.stage].wait", drop),
    tiles("NoWaitForFreeHeads", "shared.heads_empty()[side].wait", drop),
    tiles("NoWaitForHeads", "shared.heads_full()[side].wait", drop),
    tiles("TooFewBytesOfKeys", "shared.full()[ring.stage].arrive_expect", add, -16),
    tiles("NoSyncOfWeights", "__syncwarp();", drop),
    tiles("NoWaitForLastProduct", "device::wgmma_wait<0>();", drop),
    tiles("CountOfReadyTooSmall", "shared.ready()[i].init", add, -1),
    tiles("NoInitFence", "fence_mbarrier_init();", drop),
    tiles("NoBarrierAfterInit", "  __syncthreads();", drop),
    from_start.move("ScoresFromStartElsewhere", kWhole, 4),
    of_threads(288, 320, from_start.undo("ScoresFromStartOfOneWarpNotStored", kWhole)),
    from_start.undo("ScoresOfEdgesNotStored", kEdge),
    from_start.move("ScoresOfEdgesElsewhere", kEdge, -4),
    of_threads(256, 257, from_start.undo("ScoreOfAnEdgeNotStored", kEdge)),
    in_one_schedule(read_apart("ScoresOfTheNextRow", "score = shared.memory->scores", misread, 4)),
    in_one_schedule(read_apart("ScoresOfTheNextQuery", "const float score = shared.memory->scores",
                               misread, 4 * 144)),
    in_one_schedule(scales_apart("ScalesOfTheNextRow", "scores[e] = fmaf(", misread, 4)),
    in_one_schedule(
        first_rows("FirstRowOfTheNextQuery", "return __ldg(p.key_start + query", add, 4)),
    first_rows.move("FirstColumnsBehindElsewhere", "if (part == 0 && behind + lane < even)", 4),
};

WINNOW_SIMULATOR_TESTS(SimulatorScores, scores_operation(), kQuickCases, kThoroughCases, kQuickBugs,
                       kThoroughBugs);

}  // namespace
}  // namespace winnow::indexer
