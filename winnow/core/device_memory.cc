#include "winnow/core/device_memory.h"

#include <cstdlib>
#include <cstring>
#include <string>

#include "winnow/core/error.h"

#if WINNOW_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace winnow {
namespace {

constexpr std::size_t kAlignment = 64;

[[noreturn]] void fail(ErrorCode code, const char* operation, const std::string& message) {
  throw Error(code, operation, message);
}

void* allocate_on_host(std::size_t bytes) {
  // aligned_alloc wants a size that is a multiple of the alignment. The size is never zero, so that
  // null always means failure.
  const std::size_t padded = bytes + kAlignment;
  if (padded < bytes) return nullptr;
  return std::aligned_alloc(kAlignment, padded / kAlignment * kAlignment);
}

#if WINNOW_WITH_CUDA
void check(cudaError_t error, const char* operation, Device device) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // clears the error, so that no later call reports it again
  fail(ErrorCode::resource, operation,
       std::string(cudaGetErrorString(error)) + " on " + to_string(device));
}
#else
[[noreturn]] void no_cuda(const char* operation, Device device) {
  fail(ErrorCode::unsupported, operation,
       to_string(device) + " cannot be used: this build has no CUDA kernels");
}
#endif

}  // namespace

bool built_with_cuda() { return kBuiltWithCuda; }

DeviceGuard::DeviceGuard(Device device) {
  if (device.type == DeviceType::cpu) return;
#if WINNOW_WITH_CUDA
  if (cudaGetDevice(&before_) != cudaSuccess) before_ = -1;
  if (const cudaError_t error = cudaSetDevice(device.index); error != cudaSuccess) {
    cudaGetLastError();
    fail(ErrorCode::unsupported, "DeviceGuard",
         to_string(device) + " cannot be used: " + cudaGetErrorString(error));
  }
#else
  no_cuda("DeviceGuard", device);
#endif
}

DeviceGuard::~DeviceGuard() {
#if WINNOW_WITH_CUDA
  if (before_ >= 0) cudaSetDevice(before_);
#endif
}

void* allocate_on(Device device, std::size_t bytes) {
  void* memory = nullptr;
  if (device.type == DeviceType::cpu) {
    memory = allocate_on_host(bytes);
    if (memory == nullptr) {
      fail(ErrorCode::resource, "allocate_on",
           "cannot allocate " + std::to_string(bytes) + " bytes of host memory");
    }
    return memory;
  }
#if WINNOW_WITH_CUDA
  const DeviceGuard guard(device);
  check(cudaMalloc(&memory, bytes == 0 ? 1 : bytes), "allocate_on", device);
  return memory;
#else
  no_cuda("allocate_on", device);
#endif
}

void free_on(Device device, void* memory) noexcept {
  if (device.type == DeviceType::cpu) return std::free(memory);
#if WINNOW_WITH_CUDA
  cudaFree(memory);  // finds the device by the address; at exit the context may be gone already
#endif
}

void copy_between(void* to, Device to_device, const void* from, Device from_device,
                  std::size_t bytes) {
  if (bytes == 0) return;
  if (to_device.type == DeviceType::cpu && from_device.type == DeviceType::cpu) {
    std::memcpy(to, from, bytes);
    return;
  }
  const Device gpu = to_device.type == DeviceType::cuda ? to_device : from_device;
#if WINNOW_WITH_CUDA
  const DeviceGuard guard(gpu);
  check(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "copy_between", gpu);
  check(cudaDeviceSynchronize(), "copy_between", gpu);
#else
  no_cuda("copy_between", gpu);
#endif
}

void fill_zero(Device device, void* memory, std::size_t bytes) {
  if (device.type == DeviceType::cpu) {
    std::memset(memory, 0, bytes);
    return;
  }
#if WINNOW_WITH_CUDA
  const DeviceGuard guard(device);
  check(cudaMemset(memory, 0, bytes), "fill_zero", device);
  check(cudaDeviceSynchronize(), "fill_zero", device);
#else
  no_cuda("fill_zero", device);
#endif
}

void synchronize(Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::cpu) return;
#if WINNOW_WITH_CUDA
  const DeviceGuard guard(device);
  check(cudaStreamSynchronize(static_cast<cudaStream_t>(stream.handle)), "synchronize", device);
#else
  no_cuda("synchronize", device);
#endif
}

bool in_capture(Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::cpu) return false;
#if WINNOW_WITH_CUDA
  const DeviceGuard guard(device);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream.handle), &status), "in_capture",
        device);
  return status != cudaStreamCaptureStatusNone;
#else
  no_cuda("in_capture", device);
#endif
}

}  // namespace winnow
