// How an operation finds the backend that carries a call out. Internal.
#pragma once

#include <span>
#include <string_view>

#include "winnow/core/backend.h"
#include "winnow/core/export.h"

namespace winnow {

// The backend for a call on tensors of `device`: the forced one, else the first of backends() that
// is in `implemented`, serves the device and is supported here. Throws Error where there is none or
// the forced one cannot do it; never falls back from a forced backend.
WINNOW_EXPORT Backend choose_backend(std::string_view operation, Device device,
                                     const RunOptions& options,
                                     std::span<const Backend> implemented);

// Whether the contents of index tensors are to be checked for a call on tensors of `device`: on the
// CPU always, on a GPU in checking mode. Throws Error if the stream is in capture then, and on every
// device if WINNOW_CHECK is neither 0 nor 1.
WINNOW_EXPORT bool checks_contents(std::string_view operation, Device device,
                                   const RunOptions& options);

}  // namespace winnow
