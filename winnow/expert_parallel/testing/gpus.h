// Tests whose ranks are threads on the first GPU. Only for tests.
#pragma once

#include <cstdlib>
#include <string>

#include "winnow/core/device.h"
#include "winnow/core/device_memory.h"

namespace winnow::expert_parallel {

inline constexpr Device kGpu{DeviceType::cuda, 0};

// These initializers set the environment before CUDA starts. Each stream needs a hardware queue of
// its own, since the kernels of ranks wait for each other. All kernels are loaded at once, since
// loading one at its first use would wait for running kernels, which may wait for it.
inline const int kConnections = setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
inline const int kLoading = setenv("CUDA_MODULE_LOADING", "EAGER", 0);

// Where a soak runs: WINNOW_SOAK_DEVICE, cpu or cuda.
inline Device soak_device() {
  const char* name = std::getenv("WINNOW_SOAK_DEVICE");
  return name != nullptr && std::string(name) == "cuda" ? kGpu : Device{};
}

// The reason to skip a test that needs this GPU, or an empty text.
inline std::string gpu_obstacle() {
  if (!built_with_cuda()) return "this build has no CUDA kernels";
  if (gpus().gpus.empty()) return gpus().reason;
  return gpus().gpus[0].compute_major < 9 ? "needs compute capability 9.0" : "";
}

}  // namespace winnow::expert_parallel
