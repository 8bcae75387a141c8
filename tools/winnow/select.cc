#include <algorithm>

#include "tools/winnow/commands.h"

#include "winnow/core/device.h"
#include "winnow/core/error.h"
#include "winnow/core/nearest.h"

namespace winnow::cli {

std::vector<const testing::Operation*> select_operations(const std::string& command,
                                                         const std::string& name) {
  std::vector<const testing::Operation*> selected;
  std::vector<std::string> known;
  for (const testing::Operation& operation : testing::operations()) {
    if (name.empty() || operation.name == name || operation.name.starts_with(name + "::")) {
      selected.push_back(&operation);
    }
    const std::string family = operation.name.substr(0, operation.name.find(':'));
    if (std::find(known.begin(), known.end(), family) == known.end()) known.push_back(family);
    known.push_back(operation.name);
  }
  if (selected.empty()) refuse_name(command, "operation", name, known);
  return selected;
}

namespace {

Backend backend_named(const std::string& command, const std::string& name) {
  std::vector<std::string> known;
  for (const BackendStatus& status : backends()) {
    if (to_string(status.backend) == name) return status.backend;
    known.emplace_back(to_string(status.backend));
  }
  refuse_name(command, "--backend", name, known);
}

}  // namespace

testing::Target make_target(const std::string& command, const RunWhere& where) {
  testing::Target target;
  const BackendStatus* gpu = nullptr;  // the first GPU backend that works here
  std::string reason;
  for (const BackendStatus& status : backends()) {
    if (!where.backend.empty() && status.backend == backend_named(command, where.backend)) {
      target.options.backend = status.backend;
      if (!status.supported) {
        throw Error(ErrorCode::unsupported, command, "--backend", "one that works here",
                    where.backend + ": " + status.reason);
      }
    }
    if (status.backend == Backend::cpu) continue;
    if (status.supported && gpu == nullptr) gpu = &status;
    if (!status.supported && reason.empty()) reason = status.reason;
  }
  if (where.device == "cuda" && gpu == nullptr) {
    throw Error(ErrorCode::unsupported, command, "--device", "one that works here (cpu, auto)",
                "cuda: " + reason);
  }
  // A forced backend settles an automatic device.
  const bool on_gpu =
      target.options.backend.has_value() ? *target.options.backend != Backend::cpu : gpu != nullptr;
  if (where.device == "cuda" || (where.device == "auto" && on_gpu)) {
    target.device = DeviceType::cuda;
  }
  return target;
}

}  // namespace winnow::cli
