// compressor::backward of CUDA in the simulator.
#include "winnow/simulator/testing/simulate.h"

namespace winnow::compressor {

testing::Operation backward_operation();

namespace {

using simulator::beyond_a_pair;
using simulator::BugsOf;
using simulator::PassingCase;
using simulator::PlantedBug;
using Action = simulator::Plant::Action;

const std::vector<PassingCase> kQuickCases = {
    {"f32-overlap", {"eager", "random:1"}},
    {"bf16-csa", {"random:2"}},
    {"f16-keys", {"random:3"}},
    {"bf16-hca", {"eager", "random:4"}},  // clusters of eight
    {"f16-largest", {"late"}},            // of sixteen
};
const std::vector<PassingCase> kThoroughCases = {
    {"bf16-hca", {"late", "random:5", "starved:0", "starved:63"}, 8},
    {"f32-overlap-128", {"random:6"}},  // of two, which exchange nothing
    {"bf16-largest", {"random:7"}, 16},
    {"f32-strided", {"random:8"}},
    {"f16-ratio31-overlap", {"random:9"}},
    {"bf16-wide-result", {"eager"}},
    {"f32-many", {"random:10"}},
    {"f32-nan", {"eager"}},
};
const BugsOf cluster{"compressor/backward/backward_cuda.cu", "bf16-hca"},
    warps{"compressor/backward/backward_cuda.cu", "bf16-csa"},
    block{"compressor/backward/backward_cuda.cu", "f32-norm"},
    groups{"compressor/backward/backward_cuda.cu", "f32-ratio7-overlap"},
    rows{"compressor/backward/backward_cuda.cu", "f16-keys"},
    rows_of_groups{"compressor/backward/backward_cuda.cu", "f32-hadamard-groups"};
const std::vector<PlantedBug> kQuickBugs = {
    cluster("NoBarrierBeforeOthersAreReached", "// all blocks run before one reaches another",
            Action::drop),
    cluster("SumsOfBlocksBeforeTheyAreThere", "x = shared.sums[turn][0];", Action::drop, 0, -1),
    beyond_a_pair(cluster("SumsForTwoBlocks", "device::st_shared_cluster(", Action::drop)),
};
const std::vector<PlantedBug> kThoroughBugs = {
    cluster("SumsForTheNextBlock", "device::st_shared_cluster(", Action::add, 1 << 24),
    cluster("SumsElsewhere", "device::st_shared_cluster(", Action::add, 8),
    cluster("SumsForAnotherRank", "device::map_shared(own, threadIdx.x)", Action::add, 1),
    warps("SumsOfWarpsBeforeTheyAreThere", "shared.warps[turn][warp] = x;", Action::drop, 0, 1),
    rows("RowLoadedTooLate", "for (int half = 1; half < p.d; half *= 2) {", Action::drop, 0, 1),
    rows("RowReadTooEarly", "const float scale = hadamard_scale(p);", Action::drop, 0, -1),
    rows_of_groups("RowReadTooLate", "// others may write there now", Action::drop),
    groups("LargestBeforeTheyAreThere", "put(joint.largest, sums.largest);", Action::drop, 0, 1),
    groups("LargestOfGroupsBeforeTheyAreThere", "of_groups(joint.largest", Action::drop, 0, 1),
    groups("SumsBeforeTheyAreThere", "put(joint.sum, sums.sum);", Action::drop, 0, 1),
    groups("SumsOfGroupsBeforeTheyAreThere", "of_groups(joint.sum, sum_of);", Action::drop, 0, 1),
    block("PartsBeforeTheyAreAdded", "sums[threadIdx.y][threadIdx.x] = sum;", Action::drop, 0, 1),
};
WINNOW_SIMULATOR_TESTS(SimulatorCompressorBackward, backward_operation(), kQuickCases,
                       kThoroughCases, kQuickBugs, kThoroughBugs);

}  // namespace
}  // namespace winnow::compressor
