// libwinnow_nvshmem: the host functions of NVSHMEM that are used, and the kernels that put with it.
#include <cstring>

#include <cuda_runtime.h>
#include <nvshmem.h>
#include <nvshmemx.h>

#include "winnow/core/version.h"
#include "winnow/expert_parallel/exchange/fabric_kernels.cuh"
#include "winnow/expert_parallel/transport/nvshmem/nvshmem_fabric.cuh"
#include "winnow/expert_parallel/transport/nvshmem/nvshmem_library.h"

namespace winnow::expert_parallel {
namespace {

constexpr std::size_t kPage = 4096;

void version(int* major, int* minor, int* patch) {
  nvshmemx_vendor_get_version_info(major, minor, patch);
}

int unique_id(void* id) {
  static_assert(sizeof(nvshmemx_uniqueid_t) == NvshmemLibrary::kUniqueIdBytes);
  nvshmemx_uniqueid_t unique = NVSHMEMX_UNIQUEID_INITIALIZER;
  const int status = nvshmemx_get_uniqueid(&unique);
  std::memcpy(id, &unique, sizeof(unique));
  return status;
}

int gpu_id(int device, void* id) {
  cudaDeviceProp properties;
  const cudaError_t status = cudaGetDeviceProperties(&properties, device);
  static_assert(sizeof(properties.uuid) == NvshmemLibrary::kGpuIdBytes);
  std::memcpy(id, &properties.uuid, sizeof(properties.uuid));
  return status;
}

int use_gpu(int device) { return cudaSetDevice(device); }

// Does what nvshmemx_init_attr() does, but returns an error where that ends the process.
int start(const void* id, int rank, int world_size) {
  nvshmemx_uniqueid_t unique;
  std::memcpy(&unique, id, sizeof(unique));
  nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
  if (const int status = nvshmemx_set_attr_uniqueid_args(rank, world_size, &unique, &attributes)) {
    return status;
  }
  const nvshmemi_version_t compiled = {NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION,
                                       NVSHMEM_VENDOR_PATCH_VERSION};
  int provided = 0;
  if (const int status = nvshmemi_init_thread(NVSHMEM_THREAD_SERIALIZED, &provided,
                                              NVSHMEMX_INIT_WITH_UNIQUEID, &attributes, compiled)) {
    return status;
  }
  // Without a GPU only the bootstrap has run, and the next call would end the process.
  return nvshmemx_init_status() >= NVSHMEM_STATUS_IS_INITIALIZED ? 0 : -1;
}

void* allocate(std::size_t bytes) {
  void* memory = nvshmem_align(kPage, bytes);
  cudaStream_t stream = nullptr;
  if (memory == nullptr || cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess)
    return nullptr;
  // On a stream of its own: kernels on others may be waiting for another rank.
  const bool filled = cudaMemsetAsync(memory, 0, bytes, stream) == cudaSuccess &&
                      cudaStreamSynchronize(stream) == cudaSuccess;
  cudaStreamDestroy(stream);
  return filled ? memory : nullptr;
}

// Collective: nvshmem_free() waits for all ranks. Each first waits for its own kernels, which may
// still use the memory of other ranks.
void release(void* memory) {
  cudaDeviceSynchronize();
  nvshmem_free(memory);
}

void* pointer(void* memory, int rank) { return nvshmem_ptr(memory, rank); }

}  // namespace
}  // namespace winnow::expert_parallel

extern "C" __attribute__((visibility("default"))) const winnow::expert_parallel::NvshmemLibrary*
winnow_nvshmem_library() {
  using namespace winnow::expert_parallel;  // NOLINT
  static const FabricKernels fabric = make_fabric<NvshmemFabric>();
  static const NvshmemLibrary library{WINNOW_VERSION, version,  unique_id, gpu_id,  use_gpu,
                                      start,          allocate, release,   pointer, &fabric};
  return &library;
}
