// Kernels are loaded and launched, also by programmatic dependent launch: one may start before the
// one before it in the stream has ended. The device functions do nothing before sm_90, where
// kernels of a stream follow each other.
#pragma once

#include <array>
#include <cstddef>
#include <type_traits>

#include <cuda_runtime.h>

#include "winnow/device/common/kernel_order.cuh"

namespace winnow::device {

// Loads kernels onto the current GPU, which their first launch would do otherwise.
template <class... Kernels>
cudaError_t load_kernels(Kernels*... kernels) {
  cudaError_t status = cudaSuccess;
  cudaFuncAttributes attributes;
  static_cast<void>(
      (... && ((status = cudaFuncGetAttributes(&attributes, kernels)) == cudaSuccess)));
  return status;
}

// Loads a kernel and lets it have so much dynamic shared memory.
template <class Kernel>
cudaError_t load_kernel(Kernel* kernel, int shared_bytes) {
  const cudaError_t status = load_kernels(kernel);
  if (status != cudaSuccess) return status;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
}

// Returns the error of this launch alone, not what an earlier call has left for cudaGetLastError(),
// and leaves none there.
template <class... Params>
cudaError_t launch(const cudaLaunchConfig_t& config, void (*kernel)(Params...),
                   const std::type_identity_t<Params>&... params) {
  const cudaError_t status = cudaLaunchKernelEx(&config, kernel, params...);
  if (status != cudaSuccess) cudaGetLastError();
  return status;
}

// Blocks in clusters of `blocks`, neighbours along x.
inline cudaLaunchAttribute in_clusters(unsigned blocks) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = blocks;
  attribute.val.clusterDim.y = 1;
  attribute.val.clusterDim.z = 1;
  return attribute;
}

// The kernel may come before the one ahead of it has ended.
inline cudaLaunchAttribute early() {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

template <std::size_t kCount, class... Params>
cudaError_t launch_with(std::array<cudaLaunchAttribute, kCount> attributes,
                        void (*kernel)(Params...), dim3 grid, dim3 block, std::size_t shared_bytes,
                        cudaStream_t stream, const std::type_identity_t<Params>&... params) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes.data();
  config.numAttrs = static_cast<unsigned>(kCount);
  return launch(config, kernel, params...);
}

template <class... Params>
cudaError_t launch(void (*kernel)(Params...), dim3 grid, dim3 block, std::size_t shared_bytes,
                   cudaStream_t stream, const std::type_identity_t<Params>&... params) {
  return launch_with(std::array<cudaLaunchAttribute, 0>{}, kernel, grid, block, shared_bytes,
                     stream, params...);
}

// Launches a kernel in clusters of `blocks` blocks, neighbours along x. sm_90 and newer.
template <class... Params>
cudaError_t launch_clusters(void (*kernel)(Params...), unsigned blocks, dim3 grid, dim3 block,
                            std::size_t shared_bytes, cudaStream_t stream,
                            const std::type_identity_t<Params>&... params) {
  return launch_with(std::array{in_clusters(blocks)}, kernel, grid, block, shared_bytes, stream,
                     params...);
}

// Launches a kernel that calls wait_for_kernel_before(), in one-dimensional blocks. It may come
// when all blocks of the one before have called allow_next_kernel() or ended; so may what is
// launched behind it in the same way. Every block waits before it ends, even where it does nothing:
// otherwise the kernel may end before the one before it, which nobody behind it knows. sm_90 and
// newer.
template <class... Params>
cudaError_t launch_early(void (*kernel)(Params...), dim3 grid, int threads,
                         std::size_t shared_bytes, cudaStream_t stream, const Params&... params) {
  return launch_with(std::array{early()}, kernel, grid, dim3(static_cast<unsigned>(threads)),
                     shared_bytes, stream, params...);
}

// launch_early() in clusters of `blocks` blocks.
template <class... Params>
cudaError_t launch_clusters_early(void (*kernel)(Params...), int blocks, int grid, int threads,
                                  std::size_t shared_bytes, cudaStream_t stream,
                                  const Params&... params) {
  return launch_with(std::array{early(), in_clusters(static_cast<unsigned>(blocks))}, kernel,
                     dim3(static_cast<unsigned>(grid)), dim3(static_cast<unsigned>(threads)),
                     shared_bytes, stream, params...);
}

}  // namespace winnow::device
