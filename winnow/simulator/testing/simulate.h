// Runs cases of an operation's table on the simulated device. Needs GoogleTest.
//
// A test program names, for its kernels,
//   - cases and the schedules that they pass, quick ones and thorough ones;
//   - bugs to plant, the case and the schedules in which each is found.
// CTest runs the quick ones, `make simulate` all.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "winnow/simulator/launch.h"
#include "winnow/simulator/plant.h"
#include "winnow/testing/operation.h"

namespace winnow::simulator {

struct Simulated {
  std::string failed;  // the check that failed, "result" for a wrong one; empty: all is well
  std::string report;
  winnow::testing::CaseOutcome outcome{};  // of a case that passed
};

// Multiprocessors of the device, where a test does not ask for more: persistent blocks have several
// items, and share the last ones.
inline constexpr int kMultiprocessors = 2;
// Runs the case of that name under the schedule. `names_writers`: the report of a wrong result says
// who wrote the element that differs, which takes longer.
Simulated simulate(const winnow::testing::Operation& operation, const std::string& name,
                   const Schedule& schedule, int multiprocessors = kMultiprocessors,
                   bool names_writers = false);

// A case that passes under each of the schedules.
struct PassingCase {
  std::string name;
  std::vector<std::string> schedules;
  int multiprocessors = kMultiprocessors;
};
// The cases of these names, each under the schedules.
template <class... Names>
std::vector<PassingCase> under(const std::vector<std::string>& schedules, Names... names) {
  return {PassingCase{names, schedules}...};
}
// The cases of all lists.
std::vector<PassingCase> joined(std::initializer_list<std::vector<PassingCase>> lists);
// WINNOW_SIMULATOR_SCHEDULE names another schedule in their place, to repeat a failure.
void expect_passes(const winnow::testing::Operation& operation, const PassingCase& passing);
inline void expect_passes(const winnow::testing::Operation& operation, const std::string& name,
                          const std::string& schedule) {
  expect_passes(operation, {name, {schedule}});
}

// A bug that is found under each of the schedules, in the case.
struct PlantedBug {
  std::string name;
  std::string of_case;
  Plant plant;
  std::vector<std::string> schedules;
  std::string says = {};  // stands in each report; "" where it depends on the schedule
  int multiprocessors = kMultiprocessors;
};
inline PlantedBug saying(std::string text, PlantedBug bug) {
  bug.says = std::move(text);
  return bug;
}
inline PlantedBug race(PlantedBug bug) { return saying("race: ", std::move(bug)); }
// Of the calls that reach into other blocks, only those into the third one and those behind it.
inline PlantedBug beyond_a_pair(PlantedBug bug) {
  bug.plant.first_rank = 2;
  return bug;
}
// In calls and stores of threads [first, end) alone.
inline PlantedBug of_threads(unsigned first, unsigned end, PlantedBug bug) {
  bug.plant.first_thread = first;
  bug.plant.end_thread = end;
  return bug;
}
// In one of the kernels that share the line.
inline PlantedBug in_kernel(std::string kernel, PlantedBug bug) {
  bug.plant.kernel = std::move(kernel);
  return bug;
}
// In one argument of the kernel's launch, or in a member of it.
inline PlantedBug of_argument(int number, PlantedBug bug, std::size_t offset = 0,
                              std::size_t bytes = 0) {
  bug.plant.argument = {number, offset, bytes};
  return bug;
}
// For bugs that every schedule shows alike, in cases that take long.
inline PlantedBug in_one_schedule(PlantedBug bug) {
  bug.schedules = {bug.schedules.front()};
  return bug;
}
void expect_found(const winnow::testing::Operation& operation, const PlantedBug& bug);

// All cases of the operation that backend cuda takes, but for those whose names hold one of
// `large`.
std::vector<PassingCase> all_cases(const winnow::testing::Operation& operation,
                                   std::initializer_list<const char*> large);
// Each test keeps so many of its schedules, which those behind it go on with. So the tests of a
// kernel pass all of them together.
template <class Test>
std::vector<Test> in_turns(std::vector<Test> tests, std::size_t schedules_of_each) {
  std::size_t turn = 0;
  for (Test& test : tests) {
    std::vector<std::string> kept;
    for (std::size_t i = 0; i < std::min(schedules_of_each, test.schedules.size()); ++i) {
      kept.push_back(test.schedules[turn++ % test.schedules.size()]);
    }
    test.schedules = std::move(kept);
  }
  return tests;
}
// Without running anything: that the operation has the cases, and the sources the lines.
void expect_there(const winnow::testing::Operation& operation,
                  const std::vector<PassingCase>& cases);
void expect_there(const winnow::testing::Operation& operation, const std::vector<PlantedBug>& bugs);

// "eager", "late", "random:1" to "random:RANDOM", and "starved:W" for each of the warps.
std::vector<std::string> schedules(int random, std::initializer_list<int> starved);

// Bugs in the calls of one file, which a case of the operation shows under each of four schedules.
struct BugsOf {
  const char *file, *of_case;
  int multiprocessors = kMultiprocessors;

  // The call begins `below` lines below the one that holds `text`.
  PlantedBug operator()(const char* name, const char* text, Plant::Action action,
                        std::int64_t addend = 0, int below = 0) const;
  // In a plain store, which every schedule shows alike: it is missing, or goes so many bytes
  // further on.
  PlantedBug undo(const char* name, const char* text) const {
    return in_one_schedule((*this)(name, text, Plant::Action::undo));
  }
  PlantedBug move(const char* name, const char* text, std::int64_t bytes) const {
    return in_one_schedule((*this)(name, text, Plant::Action::move, bytes));
  }
};

// The first case under its first schedule, for builds in which all is slow.
inline PassingCase smallest(const std::vector<PassingCase>& cases) {
  return {cases.front().name, {cases.front().schedules.front()}, cases.front().multiprocessors};
}

// For names of tests: "bf16-h64" is bf16_h64.
std::string test_name(std::string name);

// The tests of an operation's kernels. With GoogleTest's macros for tests with parameters each file
// would compile templates of its own, which took most of the compiler's time.
struct KernelTests {
  std::string kernel;
  winnow::testing::Operation (*operation)();
  std::vector<PassingCase> quick_cases, thorough_cases;
  std::vector<PlantedBug> quick_bugs, thorough_bugs;
};
// Before main(): registers Smallest/Kernel.Passes/CASE; Quick/Kernel.Passes/CASE, under two of the
// case's schedules; Quick/KernelBug.IsFound/NAME, under one; the last two with Thorough, under two
// and with all bugs; and KernelTests.HaveTheirCasesAndLines, which finds what is out of date.
bool register_tests(KernelTests tests, const Where& where = Where::current());
// Registers SUITE.IsFound/NAME, which calls `test`.
bool register_bugs(const std::string& suite, const std::vector<PlantedBug>& bugs,
                   void (*test)(const PlantedBug& bug), const Where& where = Where::current());

// `operation` is an expression.
#define WINNOW_SIMULATOR_TESTS(Kernel, operation, quick_cases, thorough_cases, quick_bugs, \
                               thorough_bugs)                                              \
  const bool k##Kernel##Tests = winnow::simulator::register_tests(                         \
      {#Kernel, [] { return operation; }, quick_cases, thorough_cases, quick_bugs, thorough_bugs})

}  // namespace winnow::simulator
