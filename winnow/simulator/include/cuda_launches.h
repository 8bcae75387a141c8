// The calls of the CUDA runtime that launches and tests make, on the simulated device: one device,
// on which everything has happened when a call returns. Part of cuda_runtime.h.
#pragma once

#include <cstddef>
#include <cstring>
#include <tuple>
#include <utility>

#include "winnow/simulator/launch.h"

#define CUDART_VERSION 13000

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorMemoryAllocation = 2 };
inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "out of memory" : "invalid argument";
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

struct CUstream_st;
using cudaStream_t = CUstream_st*;
struct cudaFuncAttributes {};
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize,
  cudaFuncAttributePreferredSharedMemoryCarveout
};
enum { cudaSharedmemCarveoutMaxShared = 100 };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrL2CacheSize,
  cudaDevAttrMaxSharedMemoryPerBlockOptin
};
enum cudaMemcpyKind { cudaMemcpyDefault };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone };
enum cudaLaunchAttributeID {
  cudaLaunchAttributeProgrammaticStreamSerialization,
  cudaLaunchAttributeClusterDimension
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
    dim3 clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};

// ---- Device and memory -------------------------------------------------------------------------

inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int device) {
  return device == 0 ? cudaSuccess : cudaErrorInvalidValue;
}
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  const winnow::simulator::Settings& all = winnow::simulator::settings();
  *value = which == cudaDevAttrMultiProcessorCount            ? all.multiprocessors
           : which == cudaDevAttrMaxSharedMemoryPerBlockOptin ? all.shared_bytes
                                                              : static_cast<int>(all.l2_bytes);
  return cudaSuccess;
}
template <class T>
cudaError_t cudaMalloc(T** memory, std::size_t bytes) {
  *memory = static_cast<T*>(winnow::simulator::allocate(bytes));
  return *memory == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}
template <class T>
cudaError_t cudaMallocAsync(T** memory, std::size_t bytes, cudaStream_t) {
  return cudaMalloc(memory, bytes);
}
inline cudaError_t cudaFree(void* memory) { return winnow::simulator::free(memory), cudaSuccess; }
inline cudaError_t cudaFreeAsync(void* memory, cudaStream_t) { return cudaFree(memory); }
inline cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  return std::memcpy(to, from, bytes), cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind,
                                   cudaStream_t) {
  return std::memcpy(to, from, bytes), cudaSuccess;
}
inline cudaError_t cudaMemset(void* memory, int value, std::size_t bytes) {
  return std::memset(memory, value, bytes), cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes, cudaStream_t) {
  return cudaMemset(memory, value, bytes);
}
inline cudaError_t cudaMemset2DAsync(void* memory, std::size_t pitch, int value, std::size_t width,
                                     std::size_t height, cudaStream_t) {
  for (std::size_t row = 0; row < height; ++row) {
    std::memset(static_cast<std::byte*>(memory) + row * pitch, value, width);
  }
  return cudaSuccess;
}

// ---- Launches ----------------------------------------------------------------------------------

namespace winnow::simulator {
// How much dynamic shared memory a kernel may have: what was allowed, else 48 KiB.
void allow_shared_bytes(const void* kernel, std::size_t bytes);
std::size_t allowed_shared_bytes(const void* kernel);
}  // namespace winnow::simulator

template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Kernel*) {
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute which, int bytes) {
  if (which == cudaFuncAttributePreferredSharedMemoryCarveout) return cudaSuccess;
  if (bytes < 0 || bytes > winnow::simulator::settings().shared_bytes) return cudaErrorInvalidValue;
  winnow::simulator::allow_shared_bytes(reinterpret_cast<const void*>(kernel),
                                        static_cast<std::size_t>(bytes));
  return cudaSuccess;
}
template <class... Params, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...),
                               Arguments&&... arguments) {
  const dim3 grid = config->gridDim, block = config->blockDim;
  if (config->dynamicSmemBytes >
          winnow::simulator::allowed_shared_bytes(reinterpret_cast<const void*>(kernel)) ||
      std::uint64_t{grid.x} * grid.y * grid.z == 0 ||
      std::uint64_t{block.x} * block.y * block.z > 1024) {
    return cudaErrorInvalidValue;
  }
  struct Call {
    void (*kernel)(Params...);
    std::tuple<std::remove_cv_t<Params>...> parameters;
  };
  const Call call{kernel, {std::forward<Arguments>(arguments)...}};
  unsigned cluster = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) {
      cluster = config->attrs[i].val.clusterDim.x;
    }
  }
  winnow::simulator::launch(
      {{grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, config->dynamicSmemBytes, cluster},
      [](const void* given) {
        const Call& made = *static_cast<const Call*>(given);
        std::apply(made.kernel, made.parameters);
      },
      &call, sizeof(call));
  return cudaSuccess;
}
