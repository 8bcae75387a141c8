#include "winnow/testing/table.h"

#include "winnow/core/backend.h"
#include "winnow/core/error.h"

namespace winnow::testing {

std::string numbered(std::string_view prefix, std::int64_t number) {
  return std::string(prefix) + std::to_string(number);
}

void require_cpu(std::string_view operation, const Target& target) {
  if (target.device == DeviceType::cpu) return;
  std::string reasons;
  for (const BackendStatus& status : backends()) {
    if (status.backend == Backend::cpu) continue;
    reasons += (reasons.empty() ? "" : "; ") + std::string(to_string(status.backend)) + ": " +
               (status.supported ? "has no such cases" : status.reason);
  }
  throw Error(ErrorCode::unsupported, std::string(operation), "device", "cpu", reasons);
}

}  // namespace winnow::testing
