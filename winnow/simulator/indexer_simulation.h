// What the simulated tests of the indexer's kernels share: schedules, and bugs to plant.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "winnow/simulator/testing/simulate.h"

namespace winnow::indexer {

using simulator::PassingCase;
using simulator::PlantedBug;
using Action = simulator::Plant::Action;

inline const std::vector<std::string> kFew = {"eager", "late", "random:1"};
inline const std::vector<std::string> kMany = {
    "eager",     "late",      "random:1",  "random:2",  "random:3",   "random:4",  "random:5",
    "starved:0", "starved:3", "starved:5", "starved:8", "starved:12", "starved:15"};
inline const std::vector<std::string> kBugSchedules = {"eager", "late", "random:1", "random:2"};

// Bugs in the calls of one file, which a case of the operation shows.
struct BugsOf {
  const char *file, *of_case;

  // The call begins `below` lines below the one that holds `text`.
  PlantedBug operator()(const char* name, const char* text, Action action, std::int64_t addend = 0,
                        int below = 0) const {
    simulator::Plant plant;
    plant.file = file;
    plant.text = text;
    plant.action = action;
    plant.addend = addend;
    plant.below = below;
    return {name, of_case, plant, kBugSchedules};
  }
};

}  // namespace winnow::indexer
