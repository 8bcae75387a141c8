#include "tools/winnow/demo/demo.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <optional>
#include <ostream>

#include "tools/winnow/demo/output_directory.h"
#include "tools/winnow/demo/state.h"
#include "tools/winnow/demo/text_format.h"
#include "tools/winnow/printable.h"

#include "winnow/winnow.h"

namespace winnow::demo {

void StepReport::at_most(const std::string& what, double value, double limit) {
  checks_.push_back({what, format_text("%.3g, at most %.3g", value, limit), value <= limit});
}

void StepReport::at_least(const std::string& what, double value, double limit) {
  checks_.push_back({what, format_text("%.3g, at least %.3g", value, limit), value >= limit});
}

void StepReport::require(const std::string& what, bool passed) {
  checks_.push_back({what, passed ? "yes" : "no", passed});
}

bool StepReport::passed() const {
  return std::all_of(checks_.begin(), checks_.end(),
                     [](const Check& check) { return check.passed; });
}

namespace {

struct Step {
  const char* name;
  void (*run)(DemoState& state, StepReport& report);
};
constexpr Step kSteps[] = {
    {"document", run_document_step},          // bytes are tokens
    {"embedding", run_embedding_step},        // tokens become queries and latent rows
    {"dense", run_dense_step},                // what full attention looks at
    {"indexer", run_indexer_step},            // an untrained indexer picks the top-k
    {"forward", run_forward_step},            // attention over what it picked
    {"distribution", run_distribution_step},  // what the heads made of it: the teacher
    {"training", run_training_step},          // the indexer learns from the teacher
    {"learned", run_learned_step},            // attention over what it picks now
    {"backward", run_backward_step},          // gradients against finite differences
    {"decode", run_decode_step},              // the last tokens again, over a paged cache
    {"experts", run_experts_step},            // a mixture of experts over several ranks
    {"pictures", run_pictures_step},
};

constexpr int kNameWidth = 13;
constexpr int kSizeWidth = 56;

std::string verdict(bool passed) { return passed ? "ok" : "FAILED"; }

}  // namespace

void print_step(std::ostream& out, int number, const StepReport& step) {
  if (number == 1) {
    out << format_text("   %-*s%-*s%9s  checks\n", kNameWidth, "step", kSizeWidth, "size", "time");
  }
  out << format_text("%2d %-*s%-*s%7.2f s  %s\n", number, kNameWidth, step.name.c_str(), kSizeWidth,
                     step.size.c_str(), step.seconds, verdict(step.passed()).c_str());
  const std::string indent(3 + kNameWidth, ' ');
  for (const std::string& sentence : step.done) out << indent << cli::printable(sentence) << "\n";
  for (const Check& check : step.checks()) {
    out << indent << format_text("%-7s", verdict(check.passed).c_str()) << check.what << ": "
        << check.found << "\n";
  }
  out << "\n" << std::flush;
}

namespace {

void print_changes(std::ostream& out, const std::vector<Change>& changes) {
  out << format_text("   %-*s%10s%10s\n", kNameWidth + 30, "training", "before", "after");
  for (const Change& change : changes) {
    out << format_text("   %-*s%10.4f%10.4f   %s", kNameWidth + 30, change.what.c_str(),
                       change.before, change.after, change.note.c_str())
        << "\n";
  }
  out << "\n";
}

nlohmann::ordered_json to_json(const StepReport& step) {
  nlohmann::ordered_json checks = nlohmann::ordered_json::array();
  for (const Check& check : step.checks()) {
    checks.push_back({{"what", check.what}, {"found", check.found}, {"ok", check.passed}});
  }
  return {{"name", step.name},      {"size", step.size}, {"seconds", step.seconds},
          {"ok", step.passed()},    {"done", step.done}, {"checks", checks},
          {"numbers", step.numbers}};
}

void check_options(const DemoOptions& options) {
  if (options.tokens < kMinTokens || options.tokens > kMaxTokens) {
    throw Error(ErrorCode::invalid_argument, "demo", "tokens",
                format_text("%ld to %ld", kMinTokens, kMaxTokens), std::to_string(options.tokens));
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
  for (const Step& step : kSteps) {
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
