#include "tools/winnow/commands.h"

#include "winnow/core/device.h"
#include "winnow/core/error.h"

namespace winnow::cli {

std::vector<const testing::Operation*> select_operations(const std::string& command,
                                                         const std::string& name) {
  std::vector<const testing::Operation*> selected;
  std::string known;
  for (const testing::Operation& operation : testing::operations()) {
    if (name.empty() || operation.name == name || operation.name.starts_with(name + "::")) {
      selected.push_back(&operation);
    }
    known += (known.empty() ? "" : ", ") + operation.name;
  }
  if (selected.empty()) {
    throw Error(ErrorCode::invalid_argument, command, "operation", "one of " + known,
                "\"" + name + "\"");
  }
  return selected;
}

namespace {

Backend backend_named(const std::string& command, const std::string& name) {
  std::string known;
  for (const BackendStatus& status : backends()) {
    if (to_string(status.backend) == name) return status.backend;
    known += (known.empty() ? "" : ", ") + std::string(to_string(status.backend));
  }
  throw Error(ErrorCode::invalid_argument, command, "--backend", "one of " + known,
              "\"" + name + "\"");
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
