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
  // Every world and option once more with the problem's own name: "2x2-f16-weights".
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

// What every world must do.
void add_dispatch_cases(CaseTable& table, World world);
void add_combine_cases(CaseTable& table, World world);

// What one world of one node and one of several do.
void add_dispatch_options(CaseTable& table, World world);
void add_combine_options(CaseTable& table, World world);

}  // namespace winnow::expert_parallel
