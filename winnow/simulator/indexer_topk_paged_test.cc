// indexer::topk_paged of sm90 in the simulator.
#include "winnow/simulator/indexer_simulation.h"

namespace winnow::indexer {

testing::Operation topk_paged_operation();

namespace {

// Warps 0 to 7 multiply, 8 to 11 choose, 12 loads.
const std::vector<PassingCase> kQuickCases = {
    {"h64", {"eager", "late", "random:1", "starved:8", "starved:12"}},
    {"d64", {"random:2"}},
    {"h128", {"late"}},
    {"sq5", kFew},
    {"sq9", {"random:3"}},
    {"lengths-out-of-range", {"random:4"}},
    {"absent", {"late", "random:5"}},
    {"nan-larger", {"random:6"}},
    {"reversed", {"random:7"}},
    {"no-page", {"eager"}},
};
const std::vector<PassingCase> kThoroughCases = {
    {"h1", kMany},          {"h3", kMany},           {"h32", kMany},
    {"h64", kMany},         {"h128", kMany},         {"d64", kMany},
    {"d128", kMany},        {"k1", kMany},           {"k2048", kMany},
    {"sq2", kMany},         {"sq5", kMany},          {"sq9", kMany},
    {"no-table", kMany},    {"no-page", kMany},      {"long", kMany},
    {"shared", kMany},      {"absent", kMany},       {"absent-positions", kMany},
    {"positions", kMany},   {"bf16-weights", kMany}, {"wide", kMany},
    {"reversed", kMany},    {"broadcast", kMany},    {"equal-larger", kMany},
    {"nan-smaller", kMany},
};

const std::vector<PlantedBug> kQuickBugs = {};
const std::vector<PlantedBug> kThoroughBugs = {};

WINNOW_SIMULATOR_TESTS(SimulatorTopkPaged, topk_paged_operation(), kQuickCases, kThoroughCases,
                       kQuickBugs, kThoroughBugs);

}  // namespace
}  // namespace winnow::indexer
