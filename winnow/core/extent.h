// The memory that a view spans. Internal.
#pragma once

#include <cstdint>

#include "winnow/core/tensor.h"

namespace winnow {

// From the first byte of the element that lies lowest to the last of the one that lies highest.
struct Extent {
  std::int64_t bytes = 0;   // 0: no elements
  std::int64_t offset = 0;  // of element (0, ..., 0) from the first byte
};

inline Extent extent_of(const detail::TensorLayout& layout) {
  if (layout.numel() == 0) return {};
  std::int64_t low = 0, high = 0;
  for (int d = 0; d < layout.rank; ++d) {
    const std::int64_t reach = (layout.shape[d] - 1) * layout.strides[d];
    (reach < 0 ? low : high) += reach;
  }
  const std::int64_t size = size_of(layout.dtype);
  return {(high - low + 1) * size, -low * size};
}

inline Extent extent_of(const ConstTensorView& view) {
  return view.present() ? extent_of(view.layout()) : Extent{};
}

}  // namespace winnow
