// `winnow verify`: the case tables against the oracles, on the backend that really runs. Under
// a launcher each process is a rank of the cases of that world size; rank 0 speaks for all.
#include <algorithm>
#include <chrono>
#include <iostream>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "tools/winnow/commands.h"
#include "tools/winnow/demo/text_format.h"
#include "tools/winnow/progress.h"
#include "tools/winnow/table.h"
#include <nlohmann/json.hpp>

#include "winnow/core/error.h"
#include "winnow/core/nearest.h"
#include "winnow/expert_parallel/rendezvous/launch_environment.h"

namespace winnow::cli {
namespace {

using demo::format_text;
using nlohmann::ordered_json;

using Launch = std::optional<expert_parallel::LaunchEnvironment>;

// The command that runs one case again.
std::string repeat_command(const testing::Operation& operation, const testing::Case& one,
                           const testing::Target& target, const VerifyOptions& options,
                           const Launch& launch) {
  std::string command = "winnow verify " + operation.name + " --case " + one.name;
  if (launch.has_value()) {
    command = "WINNOW_RENDEZVOUS=$(mktemp -d) mpirun -n " + std::to_string(launch->world_size) +
              " " + command;
  }
  command += std::string(" --device ") + (target.device == DeviceType::cpu ? "cpu" : "cuda");
  if (!options.where.backend.empty()) command += " --backend " + options.where.backend;
  return command;
}

// The comparison that came closest to its tolerance or went furthest beyond.
const testing::Comparison& worst(const testing::CaseOutcome& outcome) {
  const auto closeness = [](const testing::Comparison& comparison) {
    if (!comparison.passed) return std::numeric_limits<double>::infinity();
    return comparison.tolerance > 0 ? comparison.error / comparison.tolerance : 0.0;
  };
  return *std::max_element(
      outcome.comparisons.begin(), outcome.comparisons.end(),
      [&](const auto& a, const auto& b) { return closeness(a) < closeness(b); });
}

// Says so where another backend ran than was asked for.
void check_backend(testing::CaseOutcome& outcome, const testing::Target& target) {
  const std::optional<Backend>& forced = target.options.backend;
  const bool on_gpu = outcome.backend != Backend::cpu;
  if (on_gpu == (target.device == DeviceType::cuda) &&
      forced.value_or(outcome.backend) == outcome.backend) {
    return;
  }
  const std::string wanted(forced ? to_string(*forced) : "one for the device");
  outcome.comparisons.push_back(
      {"backend", 1, 0, false,
       "want " + wanted + ", got " + std::string(to_string(outcome.backend))});
}

struct Totals {
  int passed = 0, failed = 0;
  ordered_json report = ordered_json::array();
};

void run_case(const testing::Operation& operation, const testing::Case& one,
              const testing::Target& target, const VerifyOptions& options, const Launch& launch,
              Table& table, Totals& totals) {
  const auto start = std::chrono::steady_clock::now();
  testing::CaseOutcome outcome = one.run(target);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  if (outcome.comparisons.empty()) {
    throw Error(ErrorCode::internal, "verify", "case " + one.name + " compared nothing");
  }
  check_backend(outcome, target);
  const testing::Comparison& shown = worst(outcome);
  const bool passed = outcome.passed();
  ++(passed ? totals.passed : totals.failed);
  const std::string backend(to_string(outcome.backend));
  table.add({one.name, backend, shown.what, format_text("%.1e", shown.error),
             format_text("%.1e", shown.tolerance), format_text("%.2f s", seconds.count()),
             passed ? "ok" : "FAILED"});
  ordered_json entry = {{"operation", operation.name}, {"case", one.name},
                        {"shape", one.shape},          {"backend", backend},
                        {"seconds", seconds.count()},  {"passed", passed}};
  for (const testing::Comparison& comparison : outcome.comparisons) {
    entry["comparisons"].push_back({{"what", comparison.what},
                                    {"error", comparison.error},
                                    {"tolerance", comparison.tolerance},
                                    {"passed", comparison.passed},
                                    {"detail", comparison.detail}});
  }
  if (!passed) entry["repeat"] = repeat_command(operation, one, target, options, launch);
  totals.report.push_back(std::move(entry));
}

void print_failures(const Totals& totals) {
  for (const auto& entry : totals.report) {
    if (entry["passed"]) continue;
    std::cout << "\nFAILED " << entry["operation"].get<std::string>() << " "
              << entry["case"].get<std::string>() << " (" << entry["shape"].get<std::string>()
              << ")\n";
    for (const auto& comparison : entry["comparisons"]) {
      if (comparison["passed"]) continue;
      std::cout << "  " << comparison["what"].get<std::string>() << ": error "
                << comparison["error"] << ", tolerance " << comparison["tolerance"] << "; "
                << comparison["detail"].get<std::string>() << "\n";
    }
    std::cout << "  repeat: " << entry["repeat"].get<std::string>() << "\n";
  }
}

// With "auto" every device that this machine has a backend for, so that a GPU is checked too.
std::vector<testing::Target> verify_targets(const RunWhere& where) {
  std::vector<testing::Target> targets = {make_target("verify", where)};
  if (where.device == "auto" && where.backend.empty() &&
      targets.front().device == DeviceType::cuda) {
    targets.insert(targets.begin(), testing::Target{});
  }
  return targets;
}

void list_cases(const std::vector<const testing::Operation*>& operations, bool json) {
  ordered_json cases = ordered_json::array();
  for (const auto* operation : operations) {
    for (const testing::Case& one : operation->cases) {
      cases.push_back({{"operation", operation->name}, {"case", one.name}, {"shape", one.shape}});
      if (!json) std::cout << operation->name << " " << one.name << "  (" << one.shape << ")\n";
    }
  }
  if (json) std::cout << ordered_json{{"cases", cases}}.dump(2) << "\n";
}

}  // namespace

int run_verify(const VerifyOptions& options) {
  const auto operations = select_operations("verify", options.operation);
  if (options.list) {
    list_cases(operations, options.json);
    return kOk;
  }
  const std::vector<testing::Target> targets = verify_targets(options.where);
  const Launch launch = expert_parallel::launch_environment();
  const bool speaks = !launch.has_value() || launch->rank == 0;
  Totals totals;
  Progress progress(std::cerr, speaks && progress_wanted());
  bool found = options.only_case.empty();
  for (const auto* operation : operations) {
    Table table({{"case"},
                 {"backend"},
                 {"closest"},
                 {"error", Table::Align::right},
                 {"tolerance", Table::Align::right},
                 {"time", Table::Align::right},
                 {"result"}});
    std::size_t done = 0;
    bool any = false;
    for (const testing::Case& one : operation->cases) {
      ++done;
      if (!options.only_case.empty() && one.name != options.only_case) continue;
      if (launch.has_value() && one.ranks != launch->world_size) continue;
      progress.show(operation->name + ": case " + std::to_string(done) + " of " +
                    std::to_string(operation->cases.size()) + ": " + one.name);
      for (const testing::Target& target : targets) {
        const Backend asked = target.options.backend.value_or(Backend::cpu);
        if (target.device == DeviceType::cuda && !one.on_gpu) continue;
        if (asked != Backend::cpu && one.only_gpu.value_or(asked) != asked) continue;
        if (one.not_on == asked) continue;
        run_case(*operation, one, target, options, launch, table, totals);
        any = true;
      }
      found = true;
    }
    progress.clear();
    if (any && speaks && !options.json) {
      std::cout << operation->name << "\n";
      table.print(std::cout);
      std::cout << "\n";
    }
  }
  if (!found) {
    std::vector<std::string> known;
    for (const auto* operation : operations) {
      for (const testing::Case& one : operation->cases) known.push_back(one.name);
    }
    throw Error(ErrorCode::invalid_argument, "verify", "--case", "a case that --list shows",
                "\"" + options.only_case + "\"" + suggestion(options.only_case, known));
  }
  if (launch.has_value() && totals.passed + totals.failed == 0) {
    throw Error(ErrorCode::invalid_argument, "verify", "world size", "one that a case has",
                std::to_string(launch->world_size));
  }
  if (!speaks) return kOk;  // rank 0 has heard what failed here
  if (options.json) {
    const ordered_json report = {
        {"passed", totals.passed}, {"failed", totals.failed}, {"cases", totals.report}};
    std::cout << report.dump(2) << "\n";
  } else {
    print_failures(totals);
    std::cout << totals.passed << " passed, " << totals.failed << " failed\n";
  }
  return totals.failed == 0 ? kOk : kCheckFailed;
}

}  // namespace winnow::cli
