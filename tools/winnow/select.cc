#include "tools/winnow/commands.h"

#include "winnow/core/device.h"
#include "winnow/core/error.h"

namespace winnow::cli {

std::vector<const testing::Operation*> select_operations(const std::string& name) {
  std::vector<const testing::Operation*> selected;
  std::string known;
  for (const testing::Operation& operation : testing::operations()) {
    if (name.empty() || operation.name == name || operation.name.starts_with(name + "::")) {
      selected.push_back(&operation);
    }
    known += (known.empty() ? "" : ", ") + operation.name;
  }
  if (selected.empty()) {
    throw Error(ErrorCode::invalid_argument, "winnow", "operation", "one of " + known,
                "\"" + name + "\"");
  }
  return selected;
}

testing::Target make_target(const RunWhere& where) {
  testing::Target target;
  if (!where.backend.empty()) target.options.backend = backend_from_string(where.backend);
  bool gpu_backend = false;
  std::string reason;
  for (const BackendStatus& status : backends()) {
    if (status.backend == Backend::cpu) continue;
    gpu_backend = gpu_backend || status.supported;
    if (!status.supported && reason.empty()) reason = status.reason;
  }
  if (where.device == "cuda" && !gpu_backend) {
    throw Error(ErrorCode::unsupported, "winnow", "--device", "one that works here (cpu, auto)",
                "cuda: " + reason);
  }
  if (where.device == "cuda" || (where.device == "auto" && gpu_backend)) {
    target.device = DeviceType::cuda;
  }
  return target;
}

}  // namespace winnow::cli
