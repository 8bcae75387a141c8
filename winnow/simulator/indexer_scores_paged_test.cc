// indexer::scores_paged of sm90 in the simulator. The kernel is that of topk_paged, whose test has
// most of its bugs; here are those of what it stores.
#include "winnow/simulator/indexer_simulation.h"

namespace winnow::indexer {

testing::Operation scores_paged_operation();

namespace {

// Warps 0 to 11 multiply, 12 and 13 load pages, 14 heads, and 15 stores what is behind the tiles.
const std::vector<PassingCase> kQuickCases = {
    {"h64", {"eager", "late", "random:1", "starved:14", "starved:15"}},
    {"d64", {"random:2"}},
    {"h128-sq3", {"late"}},
    {"sq9", {"random:3"}},
    {"lengths-out-of-range", {"random:4"}},
    {"absent", {"late"}},
    {"no-page", {"eager"}},
    {"left-no-page", {"eager"}},
    {"columns0", {"eager"}},
    {"columns130", {"random:5"}},
    {"columns9000", {"random:6"}},
    {"left-of-queries66", {"random:7"}},
    {"left-of-queries700", {"late"}},
    {"left700-reversed", {"random:8"}},
    {"columns700-wide", {"random:9"}},
    {"nan-smaller", {"random:10"}},
};
const std::vector<std::string> kEach = {"eager", "late", "random:1", "starved:14"};
const std::vector<PassingCase> kThoroughCases = joined({
    under(kEach, "h1", "d128", "sq2", "sq5", "no-table", "shared", "bf16-weights", "wide",
          "reversed", "broadcast", "h64-plateau", "lengths-of-queries-out-of-range", "columns1",
          "columns513", "columns20000", "left512", "many-sequences"),
    under(kMany, "h64", "h64-sq4", "long", "lengths-of-queries", "columns301"),
});

const BugsOf groups{"topk_paged_sm90.cuh", "columns301"}, tiles{"topk_paged_sm90.cuh", "long"},
    scores{"scores_paged_sm90.cuh", "columns9000"},
    last_columns{"scores_paged_sm90.cuh", "columns301"}, plan{"page_line.cuh", "columns301"};
constexpr const char* kRest = "*reinterpret_cast<float4*>(out + at) =";

const std::vector<PlantedBug> kQuickBugs = {
    groups("NoWaitForHeads", "shared.heads_full()[heads.stage].wait", drop),
    scores.move("ScoresOfTheNextRow", "of_group[query * stride1 + row] =", 4),
    in_one_schedule(tiles("CountOfEmptyTooSmall", "shared.empty()[i].init", add, -1)),
    in_one_schedule(BugsOf{"page_line.cuh", "columns301"}(
        "BeforeTheKernelBefore", "device::wait_for_kernel_before(last);", drop)),
};
const std::vector<PlantedBug> kThoroughBugs = {
    groups("NoWaitForFreeHeads", "shared.heads_empty()[heads.stage].wait", drop),
    groups("NoArrivalOfFreeHeads", "shared.heads_empty()[heads.stage].arrive_warp", drop),
    groups("NoArrivalOfWeightsAndLengths", "shared.heads_full()[heads.stage].arrive_warp", drop),
    tiles("NoWaitForEmptyStage", "shared.empty()[ring.stage].wait", drop),
    tiles("NoWaitForKeys", "shared.full()[ring.stage].wait", drop),
    tiles("NoCopyOfKeys", "tensor_load(shared.pages()[", drop),
    tiles("NoWaitForProducts", "device::wgmma_wait<0>();", drop),
    tiles("PageOfTheNextLane", "const int page = __shfl_sync(", add, 1),
    plan("NoBarrierBehindThePlan", "__syncthreads();", drop),
    plan("TilesOfALaneFurther", "__shfl_up_sync(device::kFullWarp, through", add, 1),
    scores.undo("ScoresNotStored", "of_group[query * stride1 + row] ="),
    scores.undo("RestNotStored", kRest),
    scores.move("RestOfTheNextLane", kRest, 16),
    last_columns.undo("LastColumnsNotStored", "e < min(at + 4, end); ++e) out[e] = rest;"),
    last_columns.move("LastColumnsOneFurther", "e < min(at + 4, end); ++e) out[e] = rest;", 4),
};

WINNOW_SIMULATOR_TESTS(SimulatorScoresPaged, scores_paged_operation(), kQuickCases, kThoroughCases,
                       kQuickBugs, kThoroughBugs);

}  // namespace
}  // namespace winnow::indexer
