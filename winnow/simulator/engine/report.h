// Words of reports.
#pragma once

#include <string>

#include "winnow/simulator/plant.h"

namespace winnow::simulator {

// "forward_sm90.cuh:312"; "a plain access" where the line of one is not known.
std::string line_of(const Where& where);
// Of the call that returns to the code, by the program's own line table.
std::string line_of_code(const void* code);

}  // namespace winnow::simulator
