// Selection of the backend for a call. Internal.
#pragma once

#include <span>
#include <string_view>

#include "winnow/core/backend.h"
#include "winnow/core/export.h"

namespace winnow {

// The backend for a call on tensors of `device`: the forced one, else the first of backends() that
// is in `implemented`, supports the device and is supported here. Throws Error if there is none or
// if the forced backend cannot run the call; never falls back from a forced backend.
// `least_capability`: the lowest compute capability (90: 9.0) of GPUs that run the operation's
// kernels; 0: those that backends() names.
WINNOW_EXPORT Backend choose_backend(std::string_view operation, Device device,
                                     const RunOptions& options,
                                     std::span<const Backend> implemented,
                                     int least_capability = 0);

// Whether a call on tensors of `device` must check the contents of index tensors: on the CPU
// always, on a GPU in checking mode. Throws Error if the stream is in capture then, and on every
// device if WINNOW_CHECK is neither 0 nor 1.
WINNOW_EXPORT bool checks_contents(std::string_view operation, Device device,
                                   const RunOptions& options);

}  // namespace winnow
