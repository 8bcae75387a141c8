// What layers of several ranks call of the CUDA runtime besides: memory pools, pinned memory,
// streams that are looked at. Part of cuda_runtime.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "winnow/simulator/launch.h"

struct CUmemPool_st;
using cudaMemPool_t = CUmemPool_st*;
enum { cudaHostAllocPortable = 1, cudaHostAllocMapped = 2 };
enum cudaStreamCaptureMode { cudaStreamCaptureModeRelaxed };
enum cudaMemAllocationType { cudaMemAllocationTypePinned };
enum cudaMemLocationType { cudaMemLocationTypeDevice };
enum cudaMemAccessFlags { cudaMemAccessFlagsProtReadWrite };
enum cudaMemPoolAttr { cudaMemPoolReuseAllowInternalDependencies };
struct cudaMemLocation {
  cudaMemLocationType type;
  int id;
};
struct cudaMemPoolProps {
  cudaMemAllocationType allocType;
  cudaMemLocation location;
};
struct cudaMemAccessDesc {
  cudaMemLocation location;
  cudaMemAccessFlags flags;
};

inline cudaError_t cudaGetDeviceCount(int* count) {
  return *count = winnow::simulator::settings().devices, cudaSuccess;
}
inline cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 1, cudaSuccess; }
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
  return cudaSuccess;
}

// ---- Memory ------------------------------------------------------------------------------------

inline cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps*) {
  return *pool = nullptr, cudaSuccess;
}
inline cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) {
  return cudaSuccess;
}
inline cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, std::size_t) {
  return cudaSuccess;
}
inline cudaError_t cudaMallocFromPoolAsync(void** memory, std::size_t bytes, cudaMemPool_t,
                                           cudaStream_t stream) {
  return cudaMallocAsync(memory, bytes, stream);
}
inline cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned) {
  *memory = winnow::simulator::allocate_of_host(bytes);
  return *memory == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}
inline cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  return *device = host, cudaSuccess;
}
inline cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from,
                                     std::size_t from_pitch, std::size_t width, std::size_t height,
                                     cudaMemcpyKind, cudaStream_t stream) {
  for (std::size_t row = 0; row < height; ++row) {
    winnow::simulator::copy_in_stream(static_cast<std::byte*>(to) + row * to_pitch,
                                      static_cast<const std::byte*>(from) + row * from_pitch, width,
                                      stream);
  }
  return cudaSuccess;
}

// ---- Streams and events ------------------------------------------------------------------------

inline cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return *least = 0, *greatest = -5, cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return cudaStreamCreateWithFlags(stream, flags);
}
inline cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  return *id = reinterpret_cast<std::uintptr_t>(stream), cudaSuccess;
}
inline cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return winnow::simulator::look(winnow::simulator::last_operation(stream)) ? cudaSuccess
                                                                            : cudaErrorNotReady;
}
inline cudaError_t cudaEventQuery(cudaEvent_t event) {
  return winnow::simulator::has_ended(event->ticket) ? cudaSuccess : cudaErrorNotReady;
}
inline cudaError_t cudaLaunchHostFunc(cudaStream_t stream, void (*function)(void*), void* data) {
  winnow::simulator::enqueue(stream, [=] { function(data); }, true);
  return cudaSuccess;
}
