// Tensors as kernels see them behind the entry point: a pointer and strides. Internal.
#pragma once

#include <cstdint>

#include "winnow/core/host_device.h"

namespace winnow {

// A tensor of up to three dimensions whose last is contiguous. Strides count elements.
template <class Pointer>
struct Rows {
  Pointer data = nullptr;
  std::int64_t stride0 = 0;
  std::int64_t stride1 = 0;
  // Whether there is a tensor, with elements or without: the data of every view is not null.
  WINNOW_HOST_DEVICE constexpr bool present() const { return data != nullptr; }
  WINNOW_HOST_DEVICE constexpr std::int64_t offset(std::int64_t i0, std::int64_t i1 = 0) const {
    return i0 * stride0 + i1 * stride1;
  }
  // The same rows of void with their elements' type.
  template <class T>
  Rows<T*> as() const {
    return {static_cast<T*>(data), stride0, stride1};
  }
};

// The rows of a view along two of its dimensions, or one; absent where the view is.
template <class Pointer, class View>
Rows<Pointer> rows_of(const View& view, int dim0, int dim1 = -1) {
  if (!view.present()) return {};
  return {static_cast<Pointer>(view.data()), view.stride(dim0), dim1 < 0 ? 0 : view.stride(dim1)};
}

}  // namespace winnow
