// The calls of the CUDA runtime that launches and tests make, on the simulated devices. Part of
// cuda_runtime.h.
#pragma once

#include <cstddef>
#include <cstring>
#include <tuple>
#include <utility>

#include "winnow/simulator/launch.h"

#define CUDART_VERSION 13000

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorNotReady = 600,
  cudaErrorUnknown = 999
};
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
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount, cudaDevAttrL2CacheSize };
enum cudaMemcpyKind { cudaMemcpyDefault, cudaMemcpyHostToDevice, cudaMemcpyDeviceToDevice };
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

inline cudaError_t cudaGetDevice(int* device) {
  return *device = winnow::simulator::current_device(), cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= winnow::simulator::settings().devices) return cudaErrorInvalidValue;
  return winnow::simulator::set_current_device(device), cudaSuccess;
}
inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  const winnow::simulator::Settings& all = winnow::simulator::settings();
  *value = which == cudaDevAttrMultiProcessorCount ? all.multiprocessors
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
inline cudaError_t cudaFreeAsync(void* memory, cudaStream_t stream) {
  return winnow::simulator::free_in_stream(memory, stream), cudaSuccess;
}
inline cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  winnow::simulator::synchronize_device();
  return std::memcpy(to, from, bytes), cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind,
                                   cudaStream_t stream) {
  return winnow::simulator::copy_in_stream(to, from, bytes, stream), cudaSuccess;
}
inline cudaError_t cudaMemset(void* memory, int value, std::size_t bytes) {
  winnow::simulator::synchronize_device();
  return std::memset(memory, value, bytes), cudaSuccess;
}
inline cudaError_t cudaMemset2DAsync(void* memory, std::size_t pitch, int value, std::size_t width,
                                     std::size_t height, cudaStream_t stream) {
  return winnow::simulator::fill_in_stream(memory, pitch, value, width, height, stream),
         cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes,
                                   cudaStream_t stream) {
  return cudaMemset2DAsync(memory, bytes, value, bytes, 1, stream);
}

// ---- Streams and events ------------------------------------------------------------------------

struct CUevent_st {
  winnow::simulator::Ticket ticket;
};
using cudaEvent_t = CUevent_st*;
enum { cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2 };

inline cudaError_t cudaDeviceSynchronize() {
  return winnow::simulator::synchronize_device(), cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = reinterpret_cast<cudaStream_t>(new char);  // an address of its own
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  winnow::simulator::synchronize(winnow::simulator::last_operation(stream));
  return cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return delete reinterpret_cast<char*>(stream), cudaSuccess;  // what it holds runs all the same
}
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return *event = new CUevent_st, cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete event, cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return event->ticket = winnow::simulator::last_operation(stream), cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return winnow::simulator::synchronize(event->ticket), cudaSuccess;
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned = 0) {
  return winnow::simulator::wait_in_stream(stream, event->ticket), cudaSuccess;
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
  if (bytes < 0 || bytes > 232448) return cudaErrorInvalidValue;
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
  static_assert((std::is_trivially_copyable_v<Params> && ...));
  const Call call{kernel, {std::forward<Arguments>(arguments)...}};
  winnow::simulator::Grid launched{
      {grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, config->dynamicSmemBytes};
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config->attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension) {
      launched.cluster = attribute.val.clusterDim.x;
    } else {
      launched.early = attribute.val.programmaticStreamSerializationAllowed != 0;
    }
  }
  winnow::simulator::launch(
      config->stream, launched,
      [](const void* given) {
        const Call& made = *static_cast<const Call*>(given);
        std::apply(made.kernel, made.parameters);
      },
      &call, sizeof(call));
  return cudaSuccess;
}

#include "winnow/simulator/include/cuda_streams.h"
