// Makes the tensors that belong to rows (scales, weights) dense, as kernels take them. Internal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "winnow/core/tensor.h"
#include "winnow/expert_parallel/layer/layer_cuda.h"

namespace winnow::expert_parallel {

struct DenseRows {
  const std::byte* data = nullptr;
  std::int64_t stride = 0;       // bytes
  std::shared_ptr<Region> copy;  // of the caller's rows if they are not dense
};

// Rows without gaps between them, nor between their elements.
DenseRows dense_rows(CudaLayer& layer, const ConstTensorView& rows);
// Rows of whole words of 4 bytes; the caller's may have any strides.
DenseRows rows_of_words(CudaLayer& layer, const ConstTensorView& rows);

}  // namespace winnow::expert_parallel
