// What the tests of the all-to-all in the simulator share.
#pragma once

#include <cstdint>
#include <exception>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "winnow/core/error.h"
#include "winnow/core/tensor.h"
#include "winnow/simulator/testing/simulate.h"

namespace winnow::expert_parallel {

using simulator::PassingCase;

// All ranks share one device, on which the blocks of all of them run at the same time: so many of
// each kernel, and of one more that has begun early.
inline void set_device(int ranks, int blocks) {
  simulator::settings().multiprocessors = ranks * blocks;
  simulator::settings().resident_clusters = static_cast<unsigned>(2 * ranks * blocks);
}

// Two blocks of each kernel for each of four ranks; more for fewer ranks.
inline constexpr int kRanksMultiprocessors = 8;
inline testing::Operation with_room(testing::Operation operation) {
  set_device(4, kRanksMultiprocessors / 4);
  return operation;
}
inline PassingCase on_ranks(std::string name, std::vector<std::string> schedules) {
  return {std::move(name), std::move(schedules), kRanksMultiprocessors};
}

// All cases that GPUs take, but for those whose names hold one of `large`; one schedule each.
inline std::vector<PassingCase> all_on_ranks(const testing::Operation& operation,
                                             std::initializer_list<const char*> large) {
  std::vector<PassingCase> list;
  for (const PassingCase& one : simulator::all_cases(operation, large)) {
    list.push_back(on_ranks(one.name, {"random:" + std::to_string(list.size() % 7 + 1)}));
  }
  return list;
}

// A tensor of i32, of which element i is of(i).
template <class Of>
Tensor numbers(std::initializer_list<std::int64_t> shape, const Of& of) {
  Tensor tensor(DType::i32, shape);
  int next = 0;
  for (std::int32_t& number : tensor.values<std::int32_t>()) {
    number = static_cast<std::int32_t>(of(next++));
  }
  return tensor;
}

// Of a case whose ranks all refuse a call with this text; `thrown` is what RankTeam::try_run()
// gave.
inline testing::CaseOutcome outcome_of_refusals(const std::vector<std::exception_ptr>& thrown,
                                                const std::string& refusal) {
  testing::CaseOutcome outcome{Backend::cuda, {}};
  for (const std::exception_ptr& one : thrown) {
    std::string text;
    try {
      if (one != nullptr) std::rethrow_exception(one);
    } catch (const Error& error) {
      text = error.what();
    }
    const bool passed = text.find(refusal) != std::string::npos;
    outcome.comparisons.push_back({"refusal", passed ? 0.0 : 1.0, 0, passed, '"' + text + '"'});
  }
  return outcome;
}

// Bugs in the calls of one file, which a case shows; under one schedule, since cases of several
// ranks take long.
struct RankBugs {
  const char *file, *of_case;

  simulator::PlantedBug operator()(const char* name, const char* text,
                                   simulator::Plant::Action action, std::int64_t addend = 0,
                                   int below = 0) const {
    simulator::PlantedBug bug =
        simulator::BugsOf{file, of_case, kRanksMultiprocessors}(name, text, action, addend, below);
    bug.schedules = {"random:1"};
    return bug;
  }
};

}  // namespace winnow::expert_parallel
