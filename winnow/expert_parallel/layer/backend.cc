#include "winnow/expert_parallel/layer/backend.h"

#include "winnow/core/record.h"
#include "winnow/core/route.h"

namespace winnow::expert_parallel {

Backend choose_layer_backend(std::string_view operation, Device device,
                             std::optional<Backend> forced) {
  constexpr Backend kImplemented[] = {Backend::cuda, Backend::cpu};
  // Bulk copies and their barriers came with it.
  constexpr int kLeastCapability = 90;
  // A wrong WINNOW_LOG is found here, as WINNOW_CHECK is, and not in a call for which others wait.
  recording(operation);
  RunOptions options;
  options.backend = forced;
  return choose_backend(operation, device, options, kImplemented, kLeastCapability);
}

}  // namespace winnow::expert_parallel
