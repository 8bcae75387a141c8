#include "winnow/simulator/testing/simulate.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>

#include "winnow/simulator/engine/writers.h"

namespace winnow::simulator {
namespace {

// The command that repeats the running test.
std::string command(const std::string& schedule) {
  const auto* const info = ::testing::UnitTest::GetInstance()->current_test_info();
  const auto& arguments = ::testing::internal::GetArgvs();
  return "WINNOW_SIMULATOR_SCHEDULE=" + schedule + " " +
         (arguments.empty() ? "simulator_test" : arguments[0]) +
         " --gtest_filter=" + info->test_suite_name() + "." + info->name();
}

std::vector<std::string> chosen(const std::vector<std::string>& schedules) {
  const char* const other = std::getenv("WINNOW_SIMULATOR_SCHEDULE");
  if (other == nullptr || *other == '\0') return schedules;
  return {other};
}

// What the call gives, or what it fails with.
template <class Call>
Simulated caught(const Call& call) {
  try {
    return call();
  } catch (const Failure& failure) {
    return {failure.check(), failure.what(), {}};
  } catch (const std::exception& error) {
    // As kernels report it that waited in vain, or as code meets it that reads what they have left.
    return {"error", std::string("error: ") + error.what(), {}};
  }
}

Simulated run(const winnow::testing::Case& one, bool names_writers) {
  const winnow::testing::CaseOutcome outcome = one.run({DeviceType::cuda, {}});
  synchronize_all();
  if (outcome.passed()) return {"", "", outcome};
  std::string report = "no comparison was made";
  for (const auto& comparison : outcome.comparisons) {
    if (!comparison.passed) {
      report = comparison.what + ": " + comparison.detail + ", error " +
               std::to_string(comparison.error) + ", tolerance " +
               std::to_string(comparison.tolerance);
      if (names_writers && comparison.element != nullptr) {
        report += "\n  the element " + describe_writer(comparison.element);
      }
    }
  }
  return {"result", "result: " + report, {}};
}

}  // namespace

Simulated simulate(const winnow::testing::Operation& operation, const std::string& name,
                   const Schedule& schedule, int multiprocessors, bool names_writers) {
  synchronize_all();
  settings().schedule = schedule;
  settings().multiprocessors = multiprocessors;
  note_writers(names_writers);
  const auto one = std::find_if(operation.cases.begin(), operation.cases.end(),
                                [&](const auto& each) { return each.name == name; });
  if (one == operation.cases.end()) {
    return {"test", operation.name + " has no case " + name, {}};
  }
  const Simulated simulated = caught([&] { return run(*one, names_writers); });
  // What it has queued and not waited for belongs to this case, not to the one behind it.
  const Simulated left = caught([] { return synchronize_all(), Simulated{}; });
  return simulated.failed.empty() && !left.failed.empty() ? left : simulated;
}

void expect_passes(const winnow::testing::Operation& operation, const PassingCase& passing) {
  for (const std::string& schedule : chosen(passing.schedules)) {
    const Schedule how = parse_schedule(schedule);
    Simulated simulated = simulate(operation, passing.name, how, passing.multiprocessors);
    if (simulated.failed == "result") {
      simulated = simulate(operation, passing.name, how, passing.multiprocessors, true);
    }
    EXPECT_TRUE(simulated.failed.empty())
        << simulated.report << "\nrepeat it with\n  " << command(schedule);
  }
}

std::vector<std::string> schedules(int random, std::initializer_list<int> starved) {
  std::vector<std::string> list = {"eager", "late"};
  for (int seed = 1; seed <= random; ++seed) list.push_back("random:" + std::to_string(seed));
  for (const int warp : starved) list.push_back("starved:" + std::to_string(warp));
  return list;
}

std::vector<PassingCase> joined(std::initializer_list<std::vector<PassingCase>> lists) {
  std::vector<PassingCase> all;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

std::vector<PassingCase> all_cases(const winnow::testing::Operation& operation,
                                   std::initializer_list<const char*> large) {
  std::vector<PassingCase> list;
  for (const winnow::testing::Case& one : operation.cases) {
    const bool small = std::none_of(large.begin(), large.end(), [&](const char* part) {
      return one.name.find(part) != std::string::npos;
    });
    const bool taken = one.on_gpu && one.only_gpu.value_or(Backend::cuda) == Backend::cuda;
    if (taken && small) list.push_back({one.name, schedules(1, {0})});
  }
  return list;
}

PlantedBug BugsOf::operator()(const char* name, const char* text, Plant::Action action,
                              std::int64_t addend, int below) const {
  Plant plant{.file = file, .text = text, .action = action, .addend = addend, .below = below};
  return {name, of_case, plant, schedules(2, {}), {}, multiprocessors};
}

namespace {

// Planted as long as it lives, whatever ends the simulation.
struct Planted {
  std::int64_t& hits;

  Planted(const Plant& bug, std::int64_t& count) : hits(count) { plant(bug, WINNOW_SOURCE_DIR); }
  ~Planted() {
    hits = plant_hits();
    unplant();
  }
};

void expect_case(const winnow::testing::Operation& operation, const std::string& name) {
  EXPECT_TRUE(std::any_of(operation.cases.begin(), operation.cases.end(),
                          [&](const auto& one) { return one.name == name; }))
      << operation.name << " has no case " << name;
}

}  // namespace

void expect_there(const winnow::testing::Operation& operation,
                  const std::vector<PassingCase>& cases) {
  for (const PassingCase& passing : cases) expect_case(operation, passing.name);
}

void expect_there(const winnow::testing::Operation& operation,
                  const std::vector<PlantedBug>& bugs) {
  for (const PlantedBug& bug : bugs) {
    expect_case(operation, bug.of_case);
    EXPECT_NO_THROW(line_of_plant(bug.plant, WINNOW_SOURCE_DIR)) << bug.name;
  }
}

void expect_found(const winnow::testing::Operation& operation, const PlantedBug& bug) {
  const bool prints = std::getenv("WINNOW_SIMULATOR_REPORTS") != nullptr;  // every report
  for (const std::string& schedule : chosen(bug.schedules)) {
    std::int64_t hits = 0;
    const Simulated simulated = [&] {
      const Planted planted(bug.plant, hits);
      return simulate(operation, bug.of_case, parse_schedule(schedule), bug.multiprocessors,
                      prints);
    }();
    EXPECT_GT(hits, 0) << "the planted bug was never met";
    EXPECT_FALSE(simulated.failed.empty())
        << "the planted bug was not found\nrepeat it with\n  " << command(schedule);
    EXPECT_THAT(simulated.report, ::testing::HasSubstr(bug.says)) << command(schedule);
    if (!simulated.failed.empty()) note_found(bug.name);
    if (prints) std::printf("%s\n", simulated.report.c_str());
  }
}

namespace {

class KernelTest : public ::testing::Test {
 public:
  explicit KernelTest(std::function<void()> body) : body_(std::move(body)) {}
  void TestBody() override { body_(); }

 private:
  std::function<void()> body_;
};

void register_test(const std::string& suite, const std::string& name, const char* parameter,
                   const Where& where, const std::function<void()>& body) {
  ::testing::RegisterTest(suite.c_str(), name.c_str(), nullptr, parameter, where.file_name(),
                          static_cast<int>(where.line()), [body] { return new KernelTest(body); });
}

// SUITE.TEST/NAME for each of the list.
template <class Tested, class Body>
void register_each(const std::string& suite, const std::string& test,
                   const std::vector<Tested>& list, const Where& where, Body body) {
  for (const Tested& one : list) {
    register_test(suite, test + "/" + test_name(one.name), one.name.c_str(), where,
                  [body, one] { body(one); });
  }
}

// For the check that kernels have enough bugs (check_bugs.cmake): a line for each, the same for two
// that are the same. HaveTheirCasesAndLines tells of those whose source line is gone.
void note_bugs(const std::vector<PlantedBug>& bugs) {
  const char* const file = std::getenv("WINNOW_SIMULATOR_BUGS");
  if (file == nullptr) return;
  std::ofstream out(file, std::ios::app);
  for (const PlantedBug& bug : bugs) {
    const Plant& plant = bug.plant;
    try {
      out << plant.file << ':' << line_of_plant(plant, WINNOW_SOURCE_DIR) << " action "
          << static_cast<int>(plant.action) << " by " << plant.addend << " in threads "
          << plant.first_thread << " to " << plant.end_thread << ", from rank " << plant.first_rank
          << ", argument " << plant.argument.number << " at " << plant.argument.offset
          << ", in kernel " << plant.kernel << '\n';
    } catch (const std::invalid_argument&) {
    }
  }
}

}  // namespace

std::string test_name(std::string name) {
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

bool register_tests(KernelTests tests, const Where& where) {
  note_bugs(tests.quick_bugs);
  note_bugs(tests.thorough_bugs);
  const auto passes = [&](const std::string& set, const std::vector<PassingCase>& cases) {
    register_each(set + "/" + tests.kernel, "Passes", cases, where,
                  [make = tests.operation](const PassingCase& one) { expect_passes(make(), one); });
  };
  const auto are_found = [&](const std::string& set, const std::vector<PlantedBug>& bugs) {
    register_each(set + "/" + tests.kernel + "Bug", "IsFound", bugs, where,
                  [make = tests.operation](const PlantedBug& one) { expect_found(make(), one); });
  };
  passes("Smallest", {smallest(tests.quick_cases)});
  passes("Quick", in_turns(tests.quick_cases, 2));
  passes("Thorough", in_turns(tests.thorough_cases, 2));
  are_found("Quick", in_turns(tests.quick_bugs, 1));
  are_found("Thorough", in_turns(tests.quick_bugs, 2));
  are_found("Thorough", in_turns(tests.thorough_bugs, 2));
  register_test(tests.kernel + "Tests", "HaveTheirCasesAndLines", nullptr, where, [tests] {
    const winnow::testing::Operation operation = tests.operation();
    expect_there(operation, tests.quick_cases);
    expect_there(operation, tests.thorough_cases);
    expect_there(operation, tests.quick_bugs);
    expect_there(operation, tests.thorough_bugs);
  });
  return true;
}

bool register_bugs(const std::string& suite, const std::vector<PlantedBug>& bugs,
                   void (*test)(const PlantedBug& bug), const Where& where) {
  note_bugs(bugs);
  register_each(suite, "IsFound", bugs, where, test);
  return true;
}

}  // namespace winnow::simulator
