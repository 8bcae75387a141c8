// Words of reports.
#pragma once

#include <cstdint>
#include <string>

#include "winnow/simulator/plant.h"

namespace winnow::simulator {

// "forward_sm90.cuh:312"; "a plain access" where the line of one is not known.
std::string line_of(const Where& where);
// Of the call that returns to the code, by the program's own line table.
std::string line_of_code(const void* code);

// "forward_kernel": without its result, namespaces, template arguments and parameters.
const std::string& name_of_kernel(const void* kernel);
// "launch 3 (forward_kernel)", of a launch that has been noted.
std::string name_of_launch(std::int64_t number);
void note_launch(std::int64_t number, const void* kernel);

}  // namespace winnow::simulator
