// What the rooms of the all-to-all make their common case table with.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "winnow/expert_parallel/testing/all_to_all_problem.h"

namespace winnow::expert_parallel {

using World = std::pair<int, int>;  // nodes and ranks per node

class CaseTable {
 public:
  // Adds the problem for the world, which its name begins with: "2x2-f16-weights".
  void add(World world, const std::string& name, Problem problem) {
    problem.nodes = world.first;
    problem.local_world_size = world.second;
    problem.name = std::to_string(world.first) + "x" + std::to_string(world.second) + "-" + name;
    list_.push_back(std::move(problem));
  }
  std::vector<Problem> take() { return std::move(list_); }

 private:
  std::vector<Problem> list_;
};

// The cases that are run in every world.
void add_dispatch_cases(CaseTable& table, World world);
void add_combine_cases(CaseTable& table, World world);

// The cases that are run in one world of one node and in one of several.
void add_dispatch_options(CaseTable& table, World world);
void add_combine_options(CaseTable& table, World world);

}  // namespace winnow::expert_parallel
