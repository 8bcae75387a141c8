// paged_xl::append of CUDA in the simulator. Its threads share nothing, so there are no bugs of
// order to plant.
#include "winnow/simulator/testing/simulate.h"

namespace winnow::paged_xl {

testing::Operation append_operation();

namespace {

using simulator::PassingCase;

const std::vector<PassingCase> kQuickCases = {
    {"f16-one-token", {"eager"}},   {"f32-d64", {"random:1"}},
    {"bf16-d80", {"late"}},         {"f16-d256", {"random:2"}},
    {"bf16-prompt", {"starved:3"}}, {"bf16-i32-slots", {"eager"}},
    {"f32-wide", {"random:3"}},     {"bf16-wide", {"eager"}},
    {"f16-reversed", {"eager"}},    {"bf16-whole-cache", {"random:4"}}};
const std::vector<PassingCase> kThoroughCases = {
    {"f32-d256", {"random:5"}},   {"f16-d112", {"random:5"}},     {"f32-b8", {"eager"}},
    {"bf16-b128", {"random:6"}},  {"f32-reversed", {"eager"}},    {"bf16-skipped", {"random:7"}},
    {"bf16-no-token", {"eager"}}, {"f32-whole-cache", {"eager"}}, {"f16-wide", {"random:8"}}};
class SimulatorPagedAppend : public ::testing::TestWithParam<PassingCase> {};
TEST_P(SimulatorPagedAppend, Passes) { simulator::expect_passes(append_operation(), GetParam()); }
constexpr auto kNameOf = [](const auto& info) { return simulator::test_name(info.param.name); };
INSTANTIATE_TEST_SUITE_P(Smallest, SimulatorPagedAppend,
                         ::testing::Values(simulator::smallest(kQuickCases)), kNameOf);
INSTANTIATE_TEST_SUITE_P(Quick, SimulatorPagedAppend, ::testing::ValuesIn(kQuickCases), kNameOf);
INSTANTIATE_TEST_SUITE_P(Thorough, SimulatorPagedAppend, ::testing::ValuesIn(kThoroughCases),
                         kNameOf);

}  // namespace
}  // namespace winnow::paged_xl
