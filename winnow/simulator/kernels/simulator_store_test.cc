// sparse_mla::store of CUDA in the simulator.
#include "winnow/simulator/testing/simulate.h"

namespace winnow::sparse_mla {

testing::Operation store_operation();

namespace {

using simulator::PassingCase;

const std::vector<PassingCase> kQuickCases = {
    {"fp8_656-rows", {"eager", "random:1"}}, {"fp8_584-rows", {"random:2"}},
    {"bf16_576-skipped", {"random:3"}},      {"bf16_512-i32-slots", {"eager"}},
    {"fp8_584-block3", {"eager"}},
};
const std::vector<PassingCase> kThoroughCases = {
    {"fp8_656-whole-cache", {"random:4"}},
    {"fp8_584-whole-cache", {"random:4"}},
    {"fp8_656-wide", {"random:5"}},
    {"fp8_584-reversed", {"random:5"}},
};
class SimulatorStore : public ::testing::TestWithParam<PassingCase> {};
// Its warps share nothing, so there are no bugs of order to plant.
TEST_P(SimulatorStore, Passes) { simulator::expect_passes(store_operation(), GetParam()); }
constexpr auto kNameOf = [](const auto& info) { return simulator::test_name(info.param.name); };
INSTANTIATE_TEST_SUITE_P(Smallest, SimulatorStore,
                         ::testing::Values(simulator::smallest(kQuickCases)), kNameOf);
INSTANTIATE_TEST_SUITE_P(Quick, SimulatorStore, ::testing::ValuesIn(kQuickCases), kNameOf);
INSTANTIATE_TEST_SUITE_P(Thorough, SimulatorStore, ::testing::ValuesIn(kThoroughCases), kNameOf);

}  // namespace
}  // namespace winnow::sparse_mla
