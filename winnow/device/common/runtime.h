// Calls of the CUDA runtime as launches make them: in the name of an operation and of a backend,
// which errors give. Host code of .cu files.
#pragma once

#include <string>

#include <cuda_runtime.h>

#include "winnow/core/error.h"

namespace winnow::device {

struct Runtime {
  const char* operation;  // "sparse_mla::forward"
  const char* backend;    // "sm90"

  // Throws Error: resource where memory could not be had, internal otherwise.
  void check(cudaError_t status, const char* what) const {
    if (status == cudaSuccess) return;
    throw Error(status == cudaErrorMemoryAllocation ? ErrorCode::resource : ErrorCode::internal,
                operation, std::string(backend) + ": " + what + ": " + cudaGetErrorString(status));
  }
  // After each launch.
  void check_launch() const { check(cudaGetLastError(), "launch"); }
  // Before the launch of a kernel that takes so many bytes of dynamic shared memory.
  template <class Kernel>
  void allow_shared_memory(Kernel* kernel, int bytes) const {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
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
