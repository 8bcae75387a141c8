// What the simulated tests of sparse_mla's kernels share.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "winnow/simulator/testing/simulate.h"

namespace winnow::sparse_mla {

using simulator::all_cases;
using simulator::BugsOf;
using simulator::in_one_schedule;
using simulator::joined;
using simulator::of_argument;
using simulator::of_threads;
using simulator::PassingCase;
using simulator::PlantedBug;
using simulator::schedules;
using simulator::under;
using Action = simulator::Plant::Action;
using enum simulator::Plant::Action;

}  // namespace winnow::sparse_mla
