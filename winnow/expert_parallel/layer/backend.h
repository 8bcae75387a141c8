// Which backend carries out the calls of a layer or a notifier. Internal.
#pragma once

#include <optional>
#include <string_view>

#include "winnow/core/backend.h"
#include "winnow/core/export.h"

namespace winnow::expert_parallel {

// As choose_backend() does: sm90, whose kernels need compute capability 9.0, or cpu. `forced` is
// Config::backend. Throws Error naming `operation`.
WINNOW_EXPORT Backend choose_layer_backend(std::string_view operation, Device device,
                                           std::optional<Backend> forced);

}  // namespace winnow::expert_parallel
