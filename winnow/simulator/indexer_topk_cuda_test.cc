// indexer::topk of every GPU in the simulator. A case runs the kernel of the dense scores too,
// whose bits the choice is compared with (indexer_scores_cuda_test.cc has its bugs). Cases with
// infinite scores are left out, as for sm90.
#include "winnow/simulator/indexer_simulation.h"

namespace winnow::indexer {

testing::Operation topk_operation();

namespace {

const bool kSet = simulate_any_gpu();

const std::vector<PassingCase> kQuickCases = {
    {"bf16-h64", {"eager", "late", "random:1", "starved:5"}},
    {"f16-h20", {"random:2"}},
    {"f8_e4m3-all-rules", {"random:3"}},
    {"bf16-equal-larger", {"late"}},
    {"bf16-nan", {"random:1"}},
    {"f8_e4m3-sk127", {"random:4"}},
    {"f8_e4m3-h64-plateau", {"late"}},
    {"f8_e4m3-sk16385-k1000", {"late"}},  // the large blocks of the choice
};
const std::vector<PassingCase> kThoroughCases =
    all_cases(topk_operation(), {"sq70001", "infinite", "sq140"});

const BugsOf few{"choose.cuh", "bf16-h16-plateau"};
const BugsOf held{"choose.cuh", "bf16-duplicates"}, reread{"choose.cuh", "bf16-h16-sk33000-zero"};
const BugsOf tiles{"score_tiles_cuda.cuh", "bf16-h128"}, rows{"copy_rows_cuda.cuh", "bf16-h128"};

const std::vector<PlantedBug> kQuickBugs = {
    few("NoBarrierOfEmptyBins", "int round = 0;", drop, 0, 2),
    few("NoBarrierOfChosen", "shared_.equal_of_warp[warp()] = own_equal;", drop, 0, 2),
    race(few("BinsByPlainStores", "atomicAdd(bins + (distance >> shift), 1u);", weaken)),
};
const std::vector<PlantedBug> kThoroughBugs = {
    held("NoBarrierOfCountedBins", "static void sync() {", drop, 0, 4),
    held("NoBarrierOfSums", "shared_.of_warp[warp()] = static_cast<std::uint32_t>(", drop, 0, 1),
    held("NoBarrierOfTheBin", "  wanted -= shared_.higher;", drop, 0, -1),
    reread("NoBarrierOfEmptyBinsAgain", "int round = 0;", drop, 0, 2),
    reread("NoBarrierOfChosenAgain", "shared_.equal_of_warp[warp()] = own_equal;", drop, 0, 2),
    reread("NoBarrierOfCountedBinsAgain", "static void sync() {", drop, 0, 4),
    reread("NoBarrierOfSumsAgain", "static_cast<std::uint32_t>(through);", drop, 0, 1),
    reread("NoBarrierOfTheBinAgain", "  wanted -= shared_.higher;", drop, 0, -1),
    race(rows("NoWaitForRows", "cp_async_wait<0>();", drop)),
    tiles("NoProducts", "mma_m16n8k16<kProductType", drop),
};

WINNOW_SIMULATOR_TESTS(SimulatorTopkCuda, topk_operation(), kQuickCases, kThoroughCases, kQuickBugs,
                       kThoroughBugs);

}  // namespace
}  // namespace winnow::indexer
