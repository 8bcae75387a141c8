#include "winnow/core/tensor.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <utility>

#include "winnow/core/device_memory.h"
#include "winnow/core/error.h"
#include "winnow/core/foreign_dtype.h"

namespace winnow {
namespace {

std::string list(std::span<const std::int64_t> values) {
  std::string text = "[";
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (i != 0) text += ", ";
    text += std::to_string(values[i]);
  }
  return text + "]";
}

[[noreturn]] void fail(std::string argument, std::string wanted, std::string got) {
  throw Error(ErrorCode::invalid_argument, "TensorView", std::move(argument), std::move(wanted),
              std::move(got));
}

void check_shape(DType dtype, std::span<const std::int64_t> shape) {
  if (shape.size() > kMaxRank) {
    fail("shape", "at most " + std::to_string(kMaxRank) + " dimensions", list(shape));
  }
  bool empty = false;
  for (const std::int64_t size : shape) {
    if (size < 0) fail("shape", "sizes of 0 or more", list(shape));
    empty = empty || size == 0;
  }
  std::int64_t bytes = size_of(dtype);
  for (const std::int64_t size : shape) {
    if (!empty && __builtin_mul_overflow(bytes, size, &bytes)) {
      fail("shape", "a byte count that fits 63 bits", list(shape));
    }
  }
}

}  // namespace

namespace detail {

TensorLayout TensorLayout::make(DType dtype, std::span<const std::int64_t> shape,
                                std::span<const std::int64_t> strides, Device device) {
  check_shape(dtype, shape);
  if (strides.size() != shape.size()) {
    fail("strides", "one per dimension of shape " + list(shape), list(strides));
  }
  TensorLayout layout{dtype, device, static_cast<int>(shape.size()), {}, {}};
  // The sum of |stride| * (size - 1) bounds every offset from both sides; an empty tensor has none.
  const bool empty = std::find(shape.begin(), shape.end(), 0) != shape.end();
  std::int64_t reach = 0;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    layout.shape[d] = shape[d];
    layout.strides[d] = strides[d];
    std::int64_t span = 0;
    if (!empty && shape[d] > 1 &&
        (__builtin_mul_overflow(strides[d], shape[d] - 1, &span) || span == INT64_MIN ||
         __builtin_add_overflow(reach, std::abs(span), &reach))) {
      fail("strides", "offsets that fit 63 bits", list(strides) + " for shape " + list(shape));
    }
  }
  if (!empty && (__builtin_add_overflow(reach, 1, &reach) ||  // the last element itself
                 __builtin_mul_overflow(reach, size_of(dtype), &reach))) {
    fail("strides", "byte offsets that fit 63 bits", list(strides) + " for shape " + list(shape));
  }
  return layout;
}

TensorLayout TensorLayout::make_dense(DType dtype, std::span<const std::int64_t> shape,
                                      Device device) {
  check_shape(dtype, shape);
  std::array<std::int64_t, kMaxRank> strides{};
  std::int64_t stride = 1;
  for (std::size_t d = shape.size(); d-- > 0;) {
    strides[d] = stride;
    // An empty tensor has no offsets: sizes that would overflow beside a 0 are harmless.
    if (__builtin_mul_overflow(stride, std::max<std::int64_t>(shape[d], 1), &stride)) stride = 0;
  }
  return make(dtype, shape, std::span(strides).first(shape.size()), device);
}

TensorLayout TensorLayout::sliced(int dim, std::int64_t begin, std::int64_t end) const {
  if (dim < 0 || dim >= rank) {
    fail("slice", "a dimension below " + std::to_string(rank), std::to_string(dim));
  }
  if (begin < 0 || begin > end || end > shape[dim]) {
    fail("slice", "0 <= begin <= end <= " + std::to_string(shape[dim]),
         std::to_string(begin) + " to " + std::to_string(end));
  }
  TensorLayout layout = *this;
  layout.shape[dim] = end - begin;
  return layout;
}

TensorLayout TensorLayout::transposed(int dim_a, int dim_b) const {
  if (dim_a < 0 || dim_a >= rank || dim_b < 0 || dim_b >= rank) {
    fail("transpose", "dimensions below " + std::to_string(rank),
         std::to_string(dim_a) + " and " + std::to_string(dim_b));
  }
  TensorLayout layout = *this;
  std::swap(layout.shape[dim_a], layout.shape[dim_b]);
  std::swap(layout.strides[dim_a], layout.strides[dim_b]);
  return layout;
}

void TensorLayout::check_host_access(DType wanted) const {
  if (dtype != wanted) {
    fail("element type", std::string(to_string(dtype)), std::string(to_string(wanted)));
  }
  if (device.type != DeviceType::cpu) fail("device", "cpu", to_string(device));
}

const void* TensorLayout::address(const void* data) const {
  constexpr std::uintptr_t kNowhere = 1 << 12;  // aligned, never dereferenced
  if (data != nullptr) return data;
  if (numel() != 0) fail("data", "a pointer", "null");
  return reinterpret_cast<const void*>(kNowhere);
}

}  // namespace detail

std::string to_string(const ConstTensorView& view) {
  if (!view.present()) return "no tensor";
  std::string text =
      name_of(view.dtype()) + " " + list(view.shape()) + " on " + to_string(view.device());
  const auto dense = detail::TensorLayout::make_dense(view.dtype(), view.shape(), view.device());
  if (view.layout().strides != dense.strides) text += " with strides " + list(view.strides());
  return text;
}

Tensor::Tensor(DType dtype, std::span<const std::int64_t> shape, Device device) {
  const auto layout = detail::TensorLayout::make_dense(dtype, shape, device);
  const auto bytes = static_cast<std::size_t>(layout.numel() * size_of(dtype));
  memory_ = std::unique_ptr<void, Free>(allocate_on(device, bytes), Free{device, nullptr});
  fill_zero(device, memory_.get(), bytes);
  view_ = TensorView(memory_.get(), dtype, shape, device);
}

Tensor Tensor::borrow(std::shared_ptr<const void> owner, void* data, DType dtype,
                      std::span<const std::int64_t> shape, Device device) {
  if (owner == nullptr) fail("owner", "one that keeps the memory", "null");
  Tensor tensor;
  tensor.view_ = TensorView(data, dtype, shape, device);
  tensor.memory_ = std::unique_ptr<void, Free>(data, Free{device, std::move(owner)});
  return tensor;
}

void Tensor::Free::operator()(void* memory) const {
  if (owner == nullptr) free_on(device, memory);
}

Tensor Tensor::to(Device device) const {
  Tensor copy(dtype(), view_.shape(), device);
  copy_between(copy.data(), device, data(), this->device(),
               static_cast<std::size_t>(numel() * size_of(dtype())));
  return copy;
}

}  // namespace winnow
