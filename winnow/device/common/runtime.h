// Calls of the CUDA runtime as launches make them: in the name of an operation and of a backend,
// which errors give. Host code of .cu files.
#pragma once

#include <cstddef>
#include <string>
#include <type_traits>

#include <cuda_runtime.h>

#include "winnow/core/error.h"
#include "winnow/device/common/launch.cuh"

namespace winnow::device {

struct Runtime {
  const char* operation;  // "sparse_mla::forward"
  const char* backend;    // "sm90"

  // Throws Error: resource if an allocation failed, internal otherwise.
  void check(cudaError_t status, const char* what) const {
    if (status == cudaSuccess) return;
    cudaGetLastError();  // it is told here, and nowhere else
    throw Error(status == cudaErrorMemoryAllocation ? ErrorCode::resource : ErrorCode::internal,
                operation, std::string(backend) + ": " + what + ": " + cudaGetErrorString(status));
  }
  template <class... Params>
  void launch(void (*kernel)(Params...), dim3 grid, dim3 block, std::size_t shared_bytes,
              cudaStream_t stream, const std::type_identity_t<Params>&... params) const {
    check(device::launch(kernel, grid, block, shared_bytes, stream, params...), "launch");
  }
  // Before the launch of a kernel that takes so many bytes of dynamic shared memory.
  template <class Kernel>
  void allow_shared_memory(Kernel* kernel, int bytes) const {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
          "cudaFuncSetAttribute");
  }
  // The same of a kernel of which several blocks share a multiprocessor: they do so only where
  // shared memory gets all of the room that it and the L1 cache have.
  template <class Kernel>
  void allow_all_shared_memory(Kernel* kernel, int bytes) const {
    allow_shared_memory(kernel, bytes);
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                               cudaSharedmemCarveoutMaxShared),
          "cudaFuncSetAttribute");
  }
  // Of the current device.
  int attribute(cudaDeviceAttr which) const {
    int device = 0, value = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
    return value;
  }
  int multiprocessors() const { return attribute(cudaDevAttrMultiProcessorCount); }
};

}  // namespace winnow::device
