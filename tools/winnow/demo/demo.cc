#include "tools/winnow/demo/demo.h"

#include <chrono>
#include <cstdlib>
#include <optional>
#include <ostream>

#include "tools/winnow/demo/output_directory.h"
#include "tools/winnow/demo/steps.h"
#include "tools/winnow/demo/text_format.h"
#include "tools/winnow/printable.h"
#include <nlohmann/json.hpp>

#include "winnow/winnow.h"

namespace winnow::demo {
namespace {

void check_options(const DemoOptions& options) {
  if (options.tokens < kMinTokens || options.tokens > kMaxTokens) {
    throw Error(ErrorCode::invalid_argument, "demo", "tokens",
                format_text("%lld to %lld", static_cast<long long>(kMinTokens),
                            static_cast<long long>(kMaxTokens)),
                std::to_string(options.tokens));
  }
  if (options.steps < kMinSteps) {
    throw Error(ErrorCode::invalid_argument, "demo", "steps",
                "at least " + std::to_string(kMinSteps), std::to_string(options.steps));
  }
  if (options.ranks < 1 || options.ranks > kMaxRanks) {
    throw Error(ErrorCode::invalid_argument, "demo", "ranks", "1 to " + std::to_string(kMaxRanks),
                std::to_string(options.ranks));
  }
}

// A GPU that the sm90 backend serves; absent where that backend is not supported.
std::optional<Device> find_gpu() {
  for (const BackendStatus& status : backends()) {
    if (status.backend != Backend::sm90 || !status.supported) continue;
    for (const Gpu& gpu : gpus().gpus) {
      if (gpu.compute_major == 9 && gpu.compute_minor == 0) {
        return Device{DeviceType::cuda, gpu.index};
      }
    }
  }
  return std::nullopt;
}

[[noreturn]] void refuse_cuda() {
  std::string reasons;
  for (const BackendStatus& status : backends()) {
    if (status.backend == Backend::sm90) reasons = status.reason;
  }
  throw Error(ErrorCode::unsupported, "demo", "--device", "cpu or auto", "cuda: " + reasons);
}

// A forced backend settles an automatic device, as in the other commands.
bool environment_asks_for_cpu() {
  const char* name = std::getenv("WINNOW_BACKEND");
  return name != nullptr && name == to_string(Backend::cpu);
}

// Lets the library choose its backend for one tiny call, so that a machine or an environment where
// it cannot is found out before the work begins.
Placement choose_placement(DeviceChoice choice) {
  const std::optional<Device> gpu = find_gpu();
  Placement result;
  if (choice == DeviceChoice::cpu) {
    result.options.backend = Backend::cpu;
  } else if (choice == DeviceChoice::cuda && !gpu.has_value()) {
    refuse_cuda();
  } else if (gpu.has_value() && (choice == DeviceChoice::cuda || !environment_asks_for_cpu())) {
    result.device = *gpu;
    result.dtype = DType::bf16;
    if (choice == DeviceChoice::cuda) result.options.backend = Backend::sm90;
  }
  const Tensor row(result.dtype, {1, 1, kRowDim}, result.device);
  const Tensor index(DType::i32, {1, 1, 1}, result.device);
  Tensor out(result.dtype, {1, 1, sparse_mla::kValueDim}, result.device);
  sparse_mla::forward({.q = row, .kv = row, .indices = index, .out = out}, result.options);
  return result;
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

nlohmann::ordered_json changes_to_json(const std::vector<Change>& changes) {
  nlohmann::ordered_json result = nlohmann::ordered_json::array();
  for (const Change& change : changes) {
    result.push_back({{"what", change.what}, {"before", change.before}, {"after", change.after}});
  }
  return result;
}

}  // namespace

DeviceChoice device_choice_from_string(const std::string& name) {
  if (name == "auto") return DeviceChoice::automatic;
  if (name == "cpu") return DeviceChoice::cpu;
  if (name == "cuda") return DeviceChoice::cuda;
  throw Error(ErrorCode::invalid_argument, "demo", "--device", "auto, cpu or cuda",
              name.empty() ? "nothing" : name);
}

int run_demo(const DemoOptions& options, std::ostream& out, std::ostream& err) {
  const auto start = std::chrono::steady_clock::now();
  check_options(options);
  DemoState state(options, err);
  state.document = read_document(options.file.value_or(options.default_document),
                                 static_cast<std::size_t>(options.tokens));
  state.placement = choose_placement(options.device);
  prepare_output_directory(options.out_dir);

  if (!options.json) {
    out << "A sparse attention layer over " << cli::printable(state.document.name)
        << " learns where to look.\n\n";
  }
  std::vector<StepReport> reports;
  bool passed = true;
  int failed_checks = 0, checks = 0;
  for (const Step& step : steps()) {
    StepReport report;
    report.name = step.name;
    state.progress.show(report.name + " ...");
    const auto step_start = std::chrono::steady_clock::now();
    step.run(state, report);
    report.seconds = seconds_since(step_start);
    state.progress.clear();
    passed = passed && report.passed();
    for (const Check& check : report.checks()) {
      ++checks;
      if (!check.passed) ++failed_checks;
    }
    reports.push_back(std::move(report));
    if (!options.json) print_step(out, static_cast<int>(reports.size()), reports.back());
  }

  const BackendsUsed& used = state.layer->backends_used();
  const std::string ran = to_string(used);
  const double seconds = seconds_since(start);
  if (options.json) {
    nlohmann::ordered_json object = {{"program", "winnow demo"},
                                     {"ok", passed},
                                     {"seconds", seconds},
                                     {"device", to_string(state.placement.device)},
                                     {"backend", ran},
                                     {"threads", num_threads()},
                                     {"document", state.document.name},
                                     {"changes", changes_to_json(state.changes)},
                                     {"files", state.files}};
    nlohmann::ordered_json& list = object["steps"] = nlohmann::ordered_json::array();
    for (const StepReport& report : reports) list.push_back(to_json(report));
    // A file name need not be UTF-8; JSON must be.
    out << object.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) << "\n";
  } else {
    print_changes(out, state.changes);
    for (const std::string& file : state.files) out << "   wrote " << cli::printable(file) << "\n";
    out << format_text("   %s that ran: %s, %d threads; %.1f s in all\n",
                       used.size() == 1 ? "backend" : "backends", ran.c_str(), num_threads(),
                       seconds);
    out << (passed ? format_text("\nAll %d checks passed.\n", checks)
                   : format_text("\n%d of %d checks FAILED.\n", failed_checks, checks));
  }
  out << std::flush;
  return passed ? kExitOk : kExitCheckFailed;
}

}  // namespace winnow::demo
