// compressor::forward of CUDA in the simulator.
#include "winnow/simulator/testing/simulate.h"

namespace winnow::compressor {

testing::Operation forward_operation();

namespace {

using simulator::BugsOf;
using simulator::PassingCase;
using simulator::PlantedBug;
using Action = simulator::Plant::Action;

const std::vector<PassingCase> kQuickCases = {
    {"f32-overlap", {"eager", "random:1"}},
    {"bf16-csa", {"random:2"}},
    {"f16-keys", {"random:3"}},
    {"bf16-ratio7-overlap", {"eager"}},
};
const std::vector<PassingCase> kThoroughCases = {
    {"bf16-hca", {"random:4"}},
    {"f32-strided", {"random:5"}},
    {"f16-d512-overlap", {"eager"}},
    {"f32-nan", {"eager"}},
};
const BugsOf groups{"window_cuda.cuh", "bf16-ratio7-overlap"}, lanes{"window_cuda.cuh", "bf16-csa"},
    keys{"window_cuda.cuh", "f16-keys"};
const std::vector<PlantedBug> kQuickBugs = {
    groups("SumsBeforeTheyAreThere", "exchange.sums[threadIdx.x] = sums;", Action::drop, 0, 1),
    lanes("SquaresBeforeTheyAreThere", "exchange.warps[warp] = x;", Action::drop, 0, 1),
};
const std::vector<PlantedBug> kThoroughBugs = {
    keys("ColumnsBeforeTheyAreThere", "exchange.columns[threadIdx.x][c] = row[c];", Action::drop, 0,
         1),
    keys("ColumnsOverwritten", "const bool upper = thread.lane & half;", Action::drop, 0, 1),
};
WINNOW_SIMULATOR_TESTS(SimulatorCompressorForward, forward_operation(), kQuickCases, kThoroughCases,
                       kQuickBugs, kThoroughBugs);

}  // namespace
}  // namespace winnow::compressor
