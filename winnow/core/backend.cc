#include "winnow/core/backend.h"

#include <array>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "winnow/core/device_memory.h"
#include "winnow/core/error.h"
#include "winnow/core/nearest.h"
#include "winnow/core/route.h"

#ifndef WINNOW_NVCC_VERSION
#define WINNOW_NVCC_VERSION "none"
#endif

namespace winnow {
namespace {

constexpr std::array kPriority = {Backend::sm100, Backend::sm90, Backend::cuda, Backend::cpu};

bool can_run(Backend backend, const Gpu& gpu, int least_capability = 0) {
  if (least_capability > 0) return gpu.compute_major * 10 + gpu.compute_minor >= least_capability;
  if (backend == Backend::sm100) {
    return gpu.compute_major == 10 && (gpu.compute_minor == 0 || gpu.compute_minor == 3);
  }
  if (backend == Backend::sm90) return gpu.compute_major == 9 && gpu.compute_minor == 0;
  return gpu.compute_major >= 8;
}

std::string describe(const Gpu& gpu) {
  return to_string(Device{DeviceType::cuda, gpu.index}) + " is " + gpu.name +
         " of compute capability " + std::to_string(gpu.compute_major) + "." +
         std::to_string(gpu.compute_minor);
}

// A backend that has never run on hardware is used only where the call or WINNOW_BACKEND names it.
bool is_chosen_unasked(Backend backend) { return backend != Backend::sm100; }

// What sm100 lacks in this build or in the driver; empty if nothing.
std::string missing_for_sm100() {
  const std::string least = "12.9";
  if (!kBuiltForSm100) {
    return "this build has no kernels for it, which want nvcc " + least +
           " or newer: it was made with nvcc " + WINNOW_NVCC_VERSION;
  }
  const std::string& driver = gpus().driver;
  int major = 0, minor = 0;
  if (std::sscanf(driver.c_str(), "%d.%d", &major, &minor) == 2 && 100 * major + minor < 1209) {
    return "the CUDA driver is one of CUDA " + driver + ", and the kernels want one of " + least;
  }
  return "";
}

// The part of an objection that says what the backend wants, and what works.
std::string wanted_by(Backend backend, const Gpu* gpu) {
  std::string text;
  if (backend == Backend::sm100) {
    text =
        ", and sm100 wants 10.0 or 10.3 (it was compiled and simulated, and has never run on "
        "hardware)";
  }
  if (gpu != nullptr && backend == Backend::sm100 && can_run(Backend::sm90, *gpu)) {
    return text + "; the sm90 backend works";
  }
  return text + "; the cpu backend works";
}

BackendStatus gpu_status(Backend backend, std::string description) {
  BackendStatus status{backend, std::move(description), false, ""};
  if (!built_with_cuda()) {
    status.reason = "this build has no kernels for it";
  } else if (gpus().gpus.empty()) {
    status.reason = gpus().reason;
  } else {
    for (const Gpu& gpu : gpus().gpus) {
      status.supported = status.supported || can_run(backend, gpu);
      status.reason += (status.reason.empty() ? "" : ", ") + describe(gpu);
    }
    if (backend == Backend::sm100) {
      if (const std::string missing = missing_for_sm100(); !missing.empty()) {
        status.supported = false;
        status.reason = missing;
      }
    }
  }
  const bool objects_to_gpus = built_with_cuda() && !gpus().gpus.empty();
  status.reason = status.supported  ? ""
                  : objects_to_gpus ? status.reason + wanted_by(backend, &gpus().gpus.front())
                                    : status.reason + "; the cpu backend works";
  return status;
}

bool serves(Backend backend, Device device) {
  return (backend == Backend::cpu) == (device.type == DeviceType::cpu);
}

// Why the backend does not serve the device; empty if it does.
std::string objection(const BackendStatus& status, Device device, int least_capability) {
  if (status.backend == Backend::cpu) return "";
  if (!built_with_cuda() || gpus().gpus.empty()) return status.reason;
  if (status.backend == Backend::sm100 && !missing_for_sm100().empty()) return status.reason;
  for (const Gpu& gpu : gpus().gpus) {
    if (gpu.index == device.index) {
      if (can_run(status.backend, gpu, least_capability)) return "";
      const std::string least = least_capability == 0
                                    ? ""
                                    : ", and this operation wants " +
                                          std::to_string(least_capability / 10) + "." +
                                          std::to_string(least_capability % 10);
      return describe(gpu) + least + wanted_by(status.backend, &gpu);
    }
  }
  return "this GPU is not visible to the process";
}

std::string names(std::span<const Backend> backends) {
  std::string text;
  for (const Backend backend : backends) {
    if (!text.empty()) text += ", ";
    text += to_string(backend);
  }
  return text;
}

// If the forced backend is one of GPUs and lacks the operation, suggests a GPU backend that has it.
std::string hint_of_gpu(Backend forced, std::span<const Backend> implemented) {
  for (const Backend backend : implemented) {
    if (forced == Backend::cpu || backend == Backend::cpu || !is_chosen_unasked(backend)) continue;
    return "; did you mean " + std::string(to_string(backend)) + "?";
  }
  return "";
}

// The backend of that name. `operation` and `argument` are for the error: who asked for it.
Backend named_backend(std::string_view operation, std::string_view argument,
                      std::string_view name) {
  std::vector<std::string> known;
  for (const Backend backend : kPriority) {
    if (name == to_string(backend)) return backend;
    known.emplace_back(to_string(backend));
  }
  refuse_name(std::string(operation), std::string(argument), std::string(name), known);
}

std::optional<Backend> forced_by_environment(std::string_view operation) {
  const char* name = std::getenv("WINNOW_BACKEND");
  if (name == nullptr || *name == '\0') return std::nullopt;
  return named_backend(operation, "WINNOW_BACKEND", name);
}

bool check_from_environment(std::string_view operation) {
  const char* text = std::getenv("WINNOW_CHECK");
  const std::string_view value = text == nullptr ? "" : text;
  if (value.empty() || value == "0") return false;
  if (value == "1") return true;
  throw Error(ErrorCode::invalid_argument, std::string(operation), "WINNOW_CHECK", "0 or 1",
              "\"" + std::string(value) + "\"");
}

}  // namespace

std::string_view to_string(Backend backend) {
  switch (backend) {
    case Backend::sm100:
      return "sm100";
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
  return named_backend("backend_from_string", "name", name);
}

std::span<const BackendStatus> backends() {
  static const std::array<BackendStatus, kPriority.size()> list = {{
      gpu_status(Backend::sm100,
                 "CUDA kernels for Blackwell (compute capability 10.0 and 10.3): compiled and "
                 "simulated, never run on hardware, and only used where it is forced"),
      gpu_status(Backend::sm90, "CUDA kernels for Hopper (compute capability 9.0)"),
      gpu_status(Backend::cuda,
                 "portable CUDA kernels (compute capability 8.0 and newer); those of operations "
                 "that sm90 has, too, have run on an H200 alone"),
      {Backend::cpu, "every operation, on any processor", true, ""},
  }};
  return list;
}

Backend choose_backend(std::string_view operation, Device device, const RunOptions& options,
                       std::span<const Backend> implemented, int least_capability) {
  const auto fail = [&](ErrorCode code, std::string wanted, std::string got) {
    throw Error(code, std::string(operation), "backend", std::move(wanted), std::move(got));
  };
  const std::optional<Backend> forced =
      options.backend.has_value() ? options.backend : forced_by_environment(operation);
  check_from_environment(operation);  // a wrong WINNOW_CHECK is an error even if nothing reads it
  std::string reasons;
  for (const BackendStatus& status : backends()) {
    if (forced.has_value() && *forced != status.backend) continue;
    const std::string name(to_string(status.backend));
    bool has_kernel = false;
    for (const Backend backend : implemented) has_kernel = has_kernel || backend == status.backend;
    if (!has_kernel) {
      if (forced.has_value()) {
        fail(ErrorCode::unsupported,
             "one that implements this operation (" + names(implemented) + ")",
             name + hint_of_gpu(*forced, implemented));
      }
      continue;
    }
    if (!serves(status.backend, device)) {
      if (forced.has_value()) {
        fail(ErrorCode::invalid_argument, "one that supports tensors on " + to_string(device),
             name);
      }
      continue;
    }
    std::string reason = objection(status, device, least_capability);
    if (reason.empty() && (forced.has_value() || is_chosen_unasked(status.backend))) {
      return status.backend;
    }
    if (!forced.has_value() && !is_chosen_unasked(status.backend)) {
      if (!reason.empty()) continue;
      reason = "it has never run on hardware, and runs only where it is forced";
    }
    reasons += (reasons.empty() ? "" : "; ") + name + ": " + reason;
  }
  if (reasons.empty()) reasons = "only " + names(implemented);
  fail(ErrorCode::unsupported, "a backend for tensors on " + to_string(device), reasons);
  return Backend::cpu;  // not reached
}

bool checks_contents(std::string_view operation, Device device, const RunOptions& options) {
  const bool by_environment = check_from_environment(operation);
  if (device.type == DeviceType::cpu) return true;
  if (!options.check && !by_environment) return false;
  if (in_capture(device, options.stream)) {
    throw Error(ErrorCode::unsupported, std::string(operation),
                "checking mode waits for the stream, which a stream in capture does not allow");
  }
  return true;
}

}  // namespace winnow
