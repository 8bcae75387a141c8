// Small kernels of the layer: they set the table of arena segments, and copy rows.
#include <algorithm>

#include <cuda_runtime.h>

#include "winnow/device/common/launch.cuh"
#include "winnow/expert_parallel/cuda/fabric.cuh"
#include "winnow/expert_parallel/layer/layer_kernels_cuda.h"

namespace winnow::expert_parallel {
namespace {

__global__ void set_segment_kernel(std::byte** row, const __grid_constant__ NodePointers pointers,
                                   int locals) {
  for (int i = threadIdx.x; i < locals; i += blockDim.x) row[i] = pointers.data[i];
}

__global__ void copy_rows_kernel(std::byte* to, std::int64_t to_stride, const std::byte* from,
                                 std::int64_t from_stride, std::int64_t bytes, std::int64_t rows) {
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    copy_by_block(to + row * to_stride, from + row * from_stride, bytes);
  }
}

__global__ void copy_columns_kernel(std::byte* to, const std::byte* from, std::int64_t row_stride,
                                    std::int64_t column_stride, std::int64_t rows,
                                    std::int64_t columns, std::int64_t element_bytes) {
  const std::int64_t step = std::int64_t(gridDim.x) * blockDim.x;
  for (std::int64_t i = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < rows * columns;
       i += step) {
    const std::byte* element = from + i / columns * row_stride + i % columns * column_stride;
    for (std::int64_t byte = 0; byte < element_bytes; ++byte) {
      to[i * element_bytes + byte] = element[byte];
    }
  }
}

}  // namespace

int load_layer_kernels() {
  return device::load_kernels(set_segment_kernel, copy_rows_kernel, copy_columns_kernel);
}

int copy_columns(std::byte* to, const std::byte* from, std::int64_t row_stride,
                 std::int64_t column_stride, std::int64_t rows, std::int64_t columns,
                 std::int64_t element_bytes, void* stream) {
  if (rows * columns == 0) return cudaSuccess;
  constexpr std::int64_t kThreads = 256, kMostBlocks = 1024;
  const std::int64_t blocks = std::min((rows * columns + kThreads - 1) / kThreads, kMostBlocks);
  return device::launch(copy_columns_kernel, static_cast<unsigned>(blocks), kThreads, 0,
                        static_cast<cudaStream_t>(stream), to, from, row_stride, column_stride,
                        rows, columns, element_bytes);
}

int set_segment(std::byte** row, const NodePointers& pointers, int locals, void* stream) {
  return device::launch(set_segment_kernel, 1, 32, 0, static_cast<cudaStream_t>(stream), row,
                        pointers, locals);
}

int copy_rows(std::byte* to, std::int64_t to_stride, const std::byte* from,
              std::int64_t from_stride, std::int64_t bytes, std::int64_t rows, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  if (rows == 0) return cudaSuccess;
  if (rows == 1) to_stride = from_stride = bytes;    // the strides of one row are arbitrary
  if (to_stride == bytes && from_stride == bytes) {  // a third faster than cudaMemcpy2DAsync
    return cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes * rows),
                           cudaMemcpyDeviceToDevice, on);
  }
  if (from_stride >= bytes) {
    return cudaMemcpy2DAsync(to, to_stride, from, from_stride, bytes, rows,
                             cudaMemcpyDeviceToDevice, on);
  }
  constexpr std::int64_t kMostBlocks = 1024;
  return device::launch(copy_rows_kernel, static_cast<unsigned>(std::min(rows, kMostBlocks)), 256,
                        0, on, to, to_stride, from, from_stride, bytes, rows);
}

}  // namespace winnow::expert_parallel
