// Words of reports.
#pragma once

#include <string>

#include "winnow/simulator/plant.h"

namespace winnow::simulator {

// "forward_sm90.cuh:312"; "a plain access" where the line is not known.
std::string line_of(const Where& where);

}  // namespace winnow::simulator
