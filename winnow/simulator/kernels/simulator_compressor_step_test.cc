// compressor::step of CUDA in the simulator.
#include "winnow/simulator/testing/simulate.h"

namespace winnow::compressor {

testing::Operation step_operation();

namespace {

using simulator::BugsOf;
using simulator::PassingCase;
using simulator::PlantedBug;
using Action = simulator::Plant::Action;

const std::vector<PassingCase> kQuickCases = {
    {"f32-overlap-undone", {"eager"}},    {"bf16-fp8_584-csa", {"random:1"}},
    {"f16-pages-left-out", {"random:2"}}, {"f32-bf16-i32-slots", {"random:3"}},
    {"bf16-pages-power-64", {"eager"}},
};
const std::vector<PassingCase> kThoroughCases = {
    {"bf16-fp8_584-hca", {"random:4"}}, {"bf16-pages-hca", {"random:4"}},
    {"f32-fp8_584-gaps", {"random:5"}}, {"f16-fp8_584-block3", {"eager"}},
    {"f32-pages-wide", {"random:6"}},   {"bf16-long-steps", {"random:7"}},
};
const BugsOf lists{"step_cuda.cu", "f32-overlap-undone"}, slots{"step_cuda.cu", "bf16-fp8_584-csa"};
const std::vector<PlantedBug> kQuickBugs = {
    lists("ListsBeforeTheyAreRead", "// what the block does hangs on one reading", Action::drop),
    slots("SlotBeforeItIsRead", "slots[thread.window] = slot;", Action::drop, 0, 1),
};
const std::vector<PlantedBug> kThoroughBugs = {
    {"StateWrittenBeforeItIsRead",
     "f32-overlap-one-undone",
     {"step_cuda.cu", "// the state has been read", Action::drop},
     {"starved:0"}},
};
WINNOW_SIMULATOR_TESTS(SimulatorCompressorStep, step_operation(), kQuickCases, kThoroughCases,
                       kQuickBugs, kThoroughBugs);

}  // namespace
}  // namespace winnow::compressor
