// Launches of the layer's own small kernels. Each returns a cudaError_t. Internal.
#pragma once

#include <cstddef>
#include <cstdint>

#include "winnow/expert_parallel/cuda/view.h"

namespace winnow::expert_parallel {

// Loads them onto the current GPU.
int load_layer_kernels();
// row[i] = pointers.data[i], i < locals, in stream order.
int set_segment(std::byte** row, const NodePointers& pointers, int locals, void* stream);
// Copies `rows` rows of `bytes` bytes on this GPU, in stream order. Strides in bytes; that of the
// source may be anything, 0 too.
int copy_rows(std::byte* to, std::int64_t to_stride, const std::byte* from,
              std::int64_t from_stride, std::int64_t bytes, std::int64_t rows, void* stream);

// Makes a table [rows, columns] of elements of 1, 2, 4 or 8 bytes with any strides (bytes) dense.
int copy_columns(std::byte* to, const std::byte* from, std::int64_t row_stride,
                 std::int64_t column_stride, std::int64_t rows, std::int64_t columns,
                 std::int64_t element_bytes, void* stream);

}  // namespace winnow::expert_parallel
