// Scratch memory of one call on a GPU. Host code of .cu files, but for scratch_bytes().
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include <cuda_runtime.h>

#include "winnow/core/host_device.h"
#include "winnow/device/common/runtime.h"

namespace winnow::device {

// Bytes of one part of a workspace, so that the next part is aligned as the workspace is.
WINNOW_HOST_DEVICE constexpr std::int64_t scratch_bytes(std::int64_t bytes) {
  return (bytes + 255) / 256 * 256;
}

// The caller's workspace. If that is null, memory from the pool of the current device
// (cudaMallocAsync), which returns to the pool in the order of the stream when the object is
// destroyed, behind the launches that use it; in a capture both are nodes of the graph. The library
// has no pool of its own and keeps nothing between calls. Aligned to 256 bytes.
class Scratch {
 public:
  // Throws Error (resource) if the memory cannot be allocated.
  Scratch(const Runtime& runtime, void* workspace, std::int64_t bytes, cudaStream_t stream)
      : data_(workspace), stream_(stream), owned_(workspace == nullptr) {
    if (!owned_) return;
    runtime.check(cudaMallocAsync(&data_, static_cast<std::size_t>(bytes), stream),
                  (std::to_string(bytes) + " bytes for the workspace").c_str());
  }
  ~Scratch() {
    if (owned_) cudaFreeAsync(data_, stream_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  void* data() const { return data_; }

 private:
  void* data_;
  cudaStream_t stream_;
  bool owned_;
};

}  // namespace winnow::device
