// Memory on any device, for programs and tests; Tensor is built on it. Internal.
#pragma once

#include <cstddef>
#include <string_view>

#include "winnow/core/device.h"
#include "winnow/core/export.h"
#include "winnow/core/stream.h"

namespace winnow {

// True if this build has CUDA kernels.
#ifndef WINNOW_WITH_CUDA
#define WINNOW_WITH_CUDA 0
#endif
inline constexpr bool kBuiltWithCuda = WINNOW_WITH_CUDA != 0;  // inside the library only
WINNOW_EXPORT bool built_with_cuda();
// Whether they include those of sm100, which need nvcc 12.9.
#ifndef WINNOW_WITH_SM100
#define WINNOW_WITH_SM100 0
#endif
inline constexpr bool kBuiltForSm100 = WINNOW_WITH_SM100 != 0;  // inside the library only

// Makes a GPU the current one of the calling thread and restores the one before. Does nothing for
// the CPU. Throws Error (unsupported) if the device cannot be used.
class WINNOW_EXPORT DeviceGuard {
 public:
  explicit DeviceGuard(Device device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = -1;  // -1: nothing to restore
};

// All of these throw Error (resource or unsupported) naming the device.
WINNOW_EXPORT void* allocate_on(Device device, std::size_t bytes);  // aligned to 64 bytes or more
WINNOW_EXPORT void free_on(Device device, void* memory) noexcept;
// Copies between any two devices and returns when it is done.
WINNOW_EXPORT void copy_between(void* to, Device to_device, const void* from, Device from_device,
                                std::size_t bytes);
WINNOW_EXPORT void fill_zero(Device device, void* memory, std::size_t bytes);
// Waits for all work queued on the stream and throws the error that a kernel has left.
WINNOW_EXPORT void synchronize(Device device, Stream stream = {});
// Whether the stream is recording a CUDA graph.
WINNOW_EXPORT bool in_capture(Device device, Stream stream);

}  // namespace winnow
