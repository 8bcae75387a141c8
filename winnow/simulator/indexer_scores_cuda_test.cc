// indexer::scores of every GPU in the simulator: a case runs the kernel of dense scores, its other
// form that begins with each query's first row, and the one of scores at indices.
#include "winnow/simulator/indexer_simulation.h"

namespace winnow::indexer {

testing::Operation scores_operation();

namespace {

const bool kSet = simulate_any_gpu();

const std::vector<PassingCase> kQuickCases = {
    {"bf16-h64", {"late", "random:1", "starved:3"}},
    {"f16-h64", {"late"}},
    {"f8_e4m3-h128", {"late", "random:2"}},
    {"bf16-h96", {"random:2"}},
    {"f16-h20", {"random:3"}},
    {"f8_e4m3-d64-h16", {"late"}},
    {"f16-d64-h64", {"late"}},
    {"bf16-stride4-from700", {"random:3"}},
    {"bf16-infinite", {"random:1"}},
    {"f8_e4m3-h33-plateau", {"random:5"}},
};
const std::vector<PassingCase> kThoroughCases =
    all_cases(scores_operation(), {"sq70001", "sk20000", "sk9000"});

// 3 and 40 tiles.
const BugsOf tiles{"score_tiles_cuda.cuh", "bf16-h128"}, f8{"score_tiles_cuda.cuh", "f8_e4m3-h128"};
const BugsOf many{"score_tiles_cuda.cuh", "bf16-zero"};
const BugsOf rows{"copy_rows_cuda.cuh", "bf16-h128"}, rows_f8{"copy_rows_cuda.cuh", "f8_e4m3-h128"};
const BugsOf rows_many{"copy_rows_cuda.cuh", "bf16-zero"};
const BugsOf kernel{"indexer/scores/scores_cuda.cuh", "bf16-h128"};
const BugsOf scaled{"indexer/scores/scores_cuda.cuh", "f8_e4m3-h128"};
const BugsOf first_rows{"indexer/seen_rows.cuh", "bf16-stride4-from2"};
constexpr const char* kFromStart = "scores[column + e] = score[e];";
constexpr const char* kDense = "dense_kernel(const __grid_constant__";
constexpr const char* kDenseScores = "*reinterpret_cast<float4*>(place) = make_float4(";
constexpr const char* kChosen = "__shfl_sync(kFullWarp, chosen_, local % kWarpRows);";
constexpr const char* kScoreAt = "p_.scores[entries_.query * p_.scores_stride + entry] =";
constexpr const char* kAt = "scores_at_kernel(const __grid_constant__";

const std::vector<PlantedBug> kQuickBugs = {
    race(rows("NoWaitForRows", "cp_async_wait<0>();", drop)),
    race(many("NoBarrierBehindTiles", "the tile is there, and the sums of", drop)),
};
const std::vector<PlantedBug> kThoroughBugs = {
    race(f8("NoBarrierBehindRows", "the tile is there, and the sums of", drop)),
    race(tiles("NoBarrierBehindTheLastSums", "the last sums are there", drop)),
    race(rows_many("WaitForTheTileBefore", "cp_async_wait<0>();", add, 1)),
    race(rows("NoCommit", "cp_async_commit();", drop)),
    rows("RowsElsewhere", "cp_async_zfill<128>(slot.unit(local", add, 16),
    rows_f8("WidenedRowsElsewhere", "st_shared(slot.unit(local", add, 16),
    rows_f8("LateRows", "st_shared(slot.unit(local", delay),
    rows_f8("NoWidenedRows", "st_shared(slot.unit(local", drop),
    tiles("OtherKeys", "ldmatrix_x4(rows.at(m", add, 16),
    saying("result: ", tiles("NoProducts", "mma_m16n8k16<kProductType", drop)),
    tiles("SumsElsewhere", "to[unit * kUnitRows", add, 4),
    tiles("NoSums", "to[unit * kUnitRows", drop),
    tiles("LateSums", "to[unit * kUnitRows", delay),
    kernel.undo("DenseScoresNotStored", kDenseScores),
    kernel.move("DenseScoresOfTheNextLane", kDenseScores, 16),
    of_threads(31, 32, kernel.undo("DenseScoresOfALaneNotStored", kDenseScores)),
    in_one_schedule(scaled("DenseScaleOfTheNextRow", "scale[e] = __ldg(p_.k_scale", add, 4)),
    kernel.undo("ScoresFromStartNotStored", kFromStart),
    kernel.move("ScoresFromStartElsewhere", kFromStart, 4),
    of_threads(32, 64, kernel.undo("ScoresFromStartOfOneWarpNotStored", kFromStart)),
    of_threads(0, 1, kernel.undo("ScoresFromStartOfOneThreadNotStored", kFromStart)),
    in_one_schedule(
        first_rows("FirstRowOfTheNextQuery", "return __ldg(p.key_start + query", add, 4)),
    first_rows.undo("FirstColumnsBehindNotStored", "if (part == 0 && behind + lane < even)"),
    first_rows.move("FirstColumnsBehindElsewhere", "if (part == 0 && behind + lane < even)", 4),
    kernel.undo("ScoresAtNotStored", kScoreAt),
    kernel.move("ScoresAtTheNextEntry", kScoreAt, 4),
    kernel.move("ScoresAtTheEntryBefore", kScoreAt, -4),
    of_threads(0, 1, kernel.undo("ScoresAtOfALaneNotStored", kScoreAt)),
    in_one_schedule(kernel("ScoresAtRowOfTheLane", kChosen, drop)),
    in_one_schedule(kernel("ScoresAtRowOfTheNextEntry", kChosen, add, 1)),
    in_one_schedule(kernel("DenseThreadsOneFurther", kDense, shift_thread, 1)),
    in_one_schedule(kernel("DenseBlocksOneFurther", kDense, shift_block, 1)),
    in_one_schedule(kernel("DenseWithoutABlock", kDense, launch_blocks, -1)),
    in_one_schedule(kernel("DenseWithoutAWarp", kDense, launch_threads, -32)),
    in_one_schedule(kernel("AtThreadsOneFurther", kAt, shift_thread, 1)),
    in_one_schedule(kernel("AtBlocksOneFurther", kAt, shift_block, 1)),
    in_one_schedule(kernel("AtWithoutABlock", kAt, launch_blocks, -1)),
    in_one_schedule(kernel("AtWithoutAWarp", kAt, launch_threads, -32)),
};

WINNOW_SIMULATOR_TESTS(SimulatorScoresCuda, scores_operation(), kQuickCases, kThoroughCases,
                       kQuickBugs, kThoroughBugs);

}  // namespace
}  // namespace winnow::indexer
