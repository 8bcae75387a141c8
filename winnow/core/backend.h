// The backends of the library, in order of priority, and how a call chooses one.
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
  sm90,  // CUDA kernels for Hopper (compute capability 9.0)
  cuda,  // portable CUDA kernels (compute capability 8.0 and newer)
  cpu,   // every operation; the definition of what it computes
};

WINNOW_EXPORT std::string_view to_string(Backend backend);
// Throws Error naming the known backends.
WINNOW_EXPORT Backend backend_from_string(std::string_view name);

struct BackendStatus {
  Backend backend = Backend::cpu;
  std::string description;
  bool supported = false;
  std::string reason;  // why not supported; empty otherwise
};

// Every backend in order of priority with what this build and this machine make of it. The answer
// of the first call is kept. Thread-safe.
WINNOW_EXPORT std::span<const BackendStatus> backends();

// How one call of an operation is carried out.
struct RunOptions {
  // Absent: the first backend of the list that implements the operation and serves the device of
  // the tensors. Present: that one or an Error (unsupported), never another.
  // The environment variable WINNOW_BACKEND forces a backend for calls that leave this absent.
  std::optional<Backend> backend{};
  Stream stream{};
  // Checking mode, also set by the environment variable WINNOW_CHECK=1 (0 or unset: off; any other
  // value is an Error): a GPU backend looks at what
  // it otherwise trusts, the contents of index tensors, as the CPU backend always does, and throws
  // its Errors before anything is written. It copies them to the host and waits for the stream, so
  // a stream in capture is an Error (unsupported).
  bool check = false;
  // Dry run: the call returns its backend, or throws the Error, after every check but those of the
  // contents of tensors. Nothing is read, written or queued: data may be any aligned address.
  bool dry_run = false;
};

}  // namespace winnow
