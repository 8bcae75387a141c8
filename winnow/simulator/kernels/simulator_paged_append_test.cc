// paged_xl::append of CUDA in the simulator. Its threads share nothing: the bugs are in its stores.
#include "winnow/simulator/testing/simulate.h"

namespace winnow::paged_xl {

testing::Operation append_operation();

namespace {

using simulator::BugsOf;
using simulator::of_threads;
using simulator::PassingCase;
using simulator::PlantedBug;

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
// A warp has the same eighth of the columns of all tokens, of which there are 21: with 64 columns
// of f32 a thread has two units of them.
const BugsOf stores{"append_cuda.cu", "f32-d64"}, elements{"append_cuda.cu", "bf16-wide"};
constexpr const char* kKeys = "*reinterpret_cast<Unit*>(to) = *this;";
constexpr const char* kValues = "to_value[std::int64_t{d + i} << p.block_shift] =";
const std::vector<PlantedBug> kQuickBugs = {
    stores.undo("KeysNotStored", kKeys),
    stores.move("ValuesOfTheNextToken", kValues, 4),
};
const std::vector<PlantedBug> kThoroughBugs = {
    stores.move("KeysOfTheNextToken", kKeys, 16),
    stores.move("KeysOfTheNextUnit", kKeys, std::int64_t{16} * 16),
    of_threads(224, 256, stores.undo("KeysOfTheLastUnitsNotStored", kKeys)),
    of_threads(20, 21, stores.undo("KeysOfTheLastTokenNotStored", kKeys)),
    elements.undo("ElementsOfKeysNotStored", "to[i] = elements[i];"),
    elements.move("ElementsOfKeysOneFurther", "to[i] = elements[i];", 2),
    stores.undo("ValuesNotStored", kValues),
    stores.move("ValuesOfTheNextColumn", kValues, std::int64_t{4} * 16),
    of_threads(224, 256, stores.undo("ValuesOfTheLastColumnsNotStored", kValues)),
    of_threads(20, 21, stores.undo("ValuesOfTheLastTokenNotStored", kValues)),
    simulator::saying("global memory: ",
                      stores.move("ValuesFarOutsideOfTheCache", kValues, std::int64_t{1} << 40)),
    elements.move("NarrowValuesOfTheTokenBefore", kValues, -2),
};
WINNOW_SIMULATOR_TESTS(SimulatorPagedAppend, append_operation(), kQuickCases, kThoroughCases,
                       kQuickBugs, kThoroughBugs);

}  // namespace
}  // namespace winnow::paged_xl
