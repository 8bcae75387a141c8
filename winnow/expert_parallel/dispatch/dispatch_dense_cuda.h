// What stands beside rows, as kernels take it: rows without gaps. Internal.
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
  std::shared_ptr<Region> copy;  // of the caller's, where theirs are not so
};

// One row behind the other. The elements of each stand together.
DenseRows dense_rows(CudaLayer& layer, const ConstTensorView& rows);
// Rows of whole words of 4 bytes, of any strides.
DenseRows rows_of_words(CudaLayer& layer, const ConstTensorView& rows);

}  // namespace winnow::expert_parallel
