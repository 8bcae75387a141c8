// The calls of the CUDA runtime that launches and tests make, on the simulated devices. Part of
// cuda_runtime.h.
#pragma once

#include <cstddef>
#include <cstring>
#include <tuple>
#include <utility>

#include "winnow/simulator/engine/writers.h"
#include "winnow/simulator/launch.h"

#define CUDART_VERSION 13000

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorNotReady = 600,
  cudaErrorInvalidClusterSize = 912,
  cudaErrorUnknown = 999
};
inline const char* cudaGetErrorString(cudaError_t error) {
  if (error == cudaErrorInvalidClusterSize) return "cluster misconfiguration";
  return error == cudaErrorMemoryAllocation ? "out of memory" : "invalid argument";
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

struct CUstream_st;
using cudaStream_t = CUstream_st*;
struct cudaFuncAttributes {};
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize,
  cudaFuncAttributePreferredSharedMemoryCarveout,
  cudaFuncAttributeNonPortableClusterSizeAllowed
};
enum { cudaSharedmemCarveoutMaxShared = 100 };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrL2CacheSize,
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrMaxSharedMemoryPerBlockOptin
};
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
  switch (which) {
    case cudaDevAttrMultiProcessorCount:
      return *value = all.multiprocessors, cudaSuccess;
    case cudaDevAttrL2CacheSize:
      return *value = static_cast<int>(all.l2_bytes), cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      return *value = all.compute_capability / 10, cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return *value = all.shared_bytes, cudaSuccess;
  }
  return cudaErrorInvalidValue;
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
  winnow::simulator::note_copy(to, from, bytes);
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
// How many blocks its clusters may have: what was allowed, else 8.
void allow_cluster(const void* kernel, unsigned blocks);
unsigned allowed_cluster(const void* kernel);
// How many clusters of such blocks the device has room for, as far as threads and dynamic shared
// memory decide that.
int clusters_at_a_time(unsigned blocks, std::size_t threads, std::size_t shared_bytes);

inline unsigned cluster_of(const cudaLaunchConfig_t& config) {
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    if (config.attrs[i].id == cudaLaunchAttributeClusterDimension) {
      return config.attrs[i].val.clusterDim.x;
    }
  }
  return 1;
}
// The kernel of the thread's next launch(): reports have its name, and `make simulate` wants to
// know which have run.
void note_kernel(const void* kernel);
}  // namespace winnow::simulator

template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Kernel*) {
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute which, int bytes) {
  if (which == cudaFuncAttributePreferredSharedMemoryCarveout) return cudaSuccess;
  if (which == cudaFuncAttributeNonPortableClusterSizeAllowed) {
    winnow::simulator::allow_cluster(reinterpret_cast<const void*>(kernel),
                                     bytes != 0 ? winnow::simulator::kMostRanks : 8);
    return cudaSuccess;
  }
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
  winnow::simulator::note_kernel(reinterpret_cast<const void*>(kernel));
  const unsigned cluster = winnow::simulator::cluster_of(*config);
  if (cluster > winnow::simulator::allowed_cluster(reinterpret_cast<const void*>(kernel)) ||
      winnow::simulator::clusters_at_a_time(cluster, std::size_t{block.x} * block.y * block.z,
                                            config->dynamicSmemBytes) == 0) {
    return cudaErrorInvalidClusterSize;
  }
  struct Call {
    void (*kernel)(Params...);
    std::tuple<std::remove_cv_t<Params>...> parameters;
  };
  static_assert((std::is_trivially_copyable_v<Params> && ...));
  Call call{kernel, {std::forward<Arguments>(arguments)...}};
  if (winnow::simulator::detail::any_planted) {
    std::apply(
        [number = 0](auto&... each) mutable {
          (winnow::simulator::detail::alter_argument(number++, &each, sizeof(each)), ...);
        },
        call.parameters);
  }
  winnow::simulator::Grid launched{
      {grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, config->dynamicSmemBytes, cluster};
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config->attrs[i];
    if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization) {
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
