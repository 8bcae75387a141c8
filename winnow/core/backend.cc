#include "winnow/core/backend.h"

#include <array>
#include <cstdlib>

#include "winnow/core/error.h"
#include "winnow/core/route.h"

namespace winnow {
namespace {

constexpr std::array kPriority = {Backend::sm90, Backend::cuda, Backend::cpu};

bool serves(Backend backend, Device device) {
  return (backend == Backend::cpu) == (device.type == DeviceType::cpu);
}

std::string names(std::span<const Backend> backends) {
  std::string text;
  for (const Backend backend : backends) {
    if (!text.empty()) text += ", ";
    text += to_string(backend);
  }
  return text;
}

std::optional<Backend> forced_by_environment() {
  const char* name = std::getenv("WINNOW_BACKEND");
  if (name == nullptr || *name == '\0') return std::nullopt;
  return backend_from_string(name);
}

}  // namespace

std::string_view to_string(Backend backend) {
  switch (backend) {
    case Backend::sm90:
      return "sm90";
    case Backend::cuda:
      return "cuda";
    case Backend::cpu:
      return "cpu";
  }
  return "unknown";
}

Backend backend_from_string(std::string_view name) {
  for (const Backend backend : kPriority) {
    if (name == to_string(backend)) return backend;
  }
  throw Error(ErrorCode::invalid_argument, "backend_from_string", "name",
              "one of " + names(kPriority), "\"" + std::string(name) + "\"");
}

std::span<const BackendStatus> backends() {
  static const std::array<BackendStatus, kPriority.size()> list = [] {
    const std::string no_kernels = "this build has no CUDA kernels; the cpu backend works";
    return std::array<BackendStatus, kPriority.size()>{{
        {Backend::sm90, "CUDA kernels for Hopper (compute capability 9.0)", false, no_kernels},
        {Backend::cuda, "portable CUDA kernels (compute capability 8.0 and newer)", false,
         no_kernels},
        {Backend::cpu, "every operation, on any processor", true, ""},
    }};
  }();
  return list;
}

Backend choose_backend(std::string_view operation, Device device, const RunOptions& options,
                       std::span<const Backend> implemented) {
  const auto fail = [&](ErrorCode code, std::string wanted, std::string got) {
    throw Error(code, std::string(operation), "backend", std::move(wanted), std::move(got));
  };
  const std::optional<Backend> forced =
      options.backend.has_value() ? options.backend : forced_by_environment();
  std::string reasons;
  for (const BackendStatus& status : backends()) {
    if (forced.has_value() && *forced != status.backend) continue;
    const std::string name(to_string(status.backend));
    bool has_kernel = false;
    for (const Backend backend : implemented) has_kernel = has_kernel || backend == status.backend;
    if (!has_kernel) {
      if (forced.has_value()) {
        fail(ErrorCode::unsupported, "one that has this operation (" + names(implemented) + ")",
             name);
      }
      continue;
    }
    if (!serves(status.backend, device)) {
      if (forced.has_value()) {
        fail(ErrorCode::invalid_argument, "one that serves tensors on " + to_string(device), name);
      }
      continue;
    }
    if (status.supported) return status.backend;
    reasons += (reasons.empty() ? "" : "; ") + name + ": " + status.reason;
  }
  if (reasons.empty()) reasons = "only " + names(implemented);
  fail(ErrorCode::unsupported, "a backend for tensors on " + to_string(device), reasons);
  return Backend::cpu;  // not reached
}

}  // namespace winnow
