// indexer::scores_paged of every GPU in the simulator.
#include "winnow/simulator/indexer_simulation.h"

namespace winnow::indexer {

testing::Operation scores_paged_operation();

namespace {

const bool kSet = simulate_any_gpu();

const std::vector<PassingCase> kQuickCases = {
    {"h64", {"late", "random:1", "starved:4"}},
    {"h128-sq3", {"late"}},
    {"lengths-out-of-range", {"random:4"}},
    {"absent", {"late"}},
    {"no-page", {"eager"}},
    {"left-no-page", {"eager"}},
    {"columns0", {"eager"}},
    {"columns130", {"random:5"}},
    {"columns9000", {"random:6"}},
    {"left-of-queries66", {"random:7"}},
    {"left700-reversed", {"random:8"}},
    {"nan-smaller", {"random:10"}},
};
const std::vector<PassingCase> kThoroughCases = all_cases(scores_paged_operation(), {});

const BugsOf rows{"copy_rows_cuda.cuh", "columns301"};
const BugsOf tiles{"score_tiles_cuda.cuh", "long"}, groups{"score_tiles_cuda.cuh", "columns301"};

const std::vector<PlantedBug> kQuickBugs = {
    race(tiles("NoBarrierBehindTiles", "the tile is there, and the sums of", drop)),
    race(groups("NoBarrierBehindTheLastSums", "the last sums are there", drop)),
};
const std::vector<PlantedBug> kThoroughBugs = {
    groups("NoBarrierBehindRows", "the tile is there, and the sums of", drop),
    rows("RowsElsewhere", "st_shared(slot.unit(local", add, 16),
    rows("NoRows", "st_shared(slot.unit(local", drop),
    rows("LateRows", "st_shared(slot.unit(local", delay),
    groups("OtherKeys", "ldmatrix_x4(rows.at(m", add, 16),
    groups("NoProducts", "mma_m16n8k16<kProductType", drop),
    groups("SumsElsewhere", "to[unit * kUnitRows", add, 4),
    groups("NoSums", "to[unit * kUnitRows", drop),
};

WINNOW_SIMULATOR_TESTS(SimulatorScoresPagedCuda, scores_paged_operation(), kQuickCases,
                       kThoroughCases, kQuickBugs, kThoroughBugs);

}  // namespace
}  // namespace winnow::indexer
