// The backends of the library in order of priority, and how a call selects one.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "winnow/core/device.h"
#include "winnow/core/export.h"
#include "winnow/core/stream.h"

namespace winnow {

enum class Backend {
  sm100,  // CUDA kernels for Blackwell (compute capability 10.0 and 10.3); only where it is forced
  sm90,   // CUDA kernels for Hopper (compute capability 9.0)
  cuda,   // portable CUDA kernels (compute capability 8.0 and newer)
  cpu,    // every operation; defines what an operation computes
};

WINNOW_EXPORT std::string_view to_string(Backend backend);
// Throws Error naming the known backends.
WINNOW_EXPORT Backend backend_from_string(std::string_view name);

struct BackendStatus {
  Backend backend = Backend::cpu;
  std::string description;
  bool supported = false;
  std::string reason;  // why it is not supported; empty if it is
};

// Every backend in order of priority, and whether this build and this machine support it. The first
// call determines the answer. Thread-safe.
WINNOW_EXPORT std::span<const BackendStatus> backends();

// Options of one call of an operation.
struct RunOptions {
  // If set, use exactly this backend or throw Error (unsupported). Otherwise the call uses the
  // backend that the environment variable WINNOW_BACKEND names, or the first of the list that
  // implements the operation and supports the device of the tensors; never sm100, which was
  // compiled and simulated but has not run on hardware.
  std::optional<Backend> backend{};
  Stream stream{};
  // Checking mode, which the environment variable WINNOW_CHECK=1 also enables (any value other than
  // 0 and 1 is an Error): a GPU backend validates the contents of index tensors before it launches,
  // as the CPU backend always does, and throws before anything is written. It copies these tensors
  // to the host and waits for the stream, so a stream in capture is an Error (unsupported).
  bool check = false;
  // Dry run: the call makes every check except those of the contents of tensors, and returns the
  // backend that would run or throws the Error. Nothing is read, written or queued, so the data
  // pointers may be any aligned addresses.
  bool dry_run = false;
};

}  // namespace winnow
