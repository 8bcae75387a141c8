// Tensors: non-owning views, which every operation takes, and an owning tensor for programs.
#pragma once

#include <array>
#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>

#include "winnow/core/device.h"
#include "winnow/core/dtype.h"
#include "winnow/core/export.h"

namespace winnow {

inline constexpr int kMaxRank = 6;

namespace detail {

struct TensorLayout {
  DType dtype = DType::u8;
  Device device;
  int rank = 0;
  std::array<std::int64_t, kMaxRank> shape{};
  std::array<std::int64_t, kMaxRank> strides{};

  // Throws Error if the rank, a size or the address range is out of bounds.
  WINNOW_EXPORT static TensorLayout make(DType dtype, std::span<const std::int64_t> shape,
                                         std::span<const std::int64_t> strides, Device device);
  // Strides of a dense row-major tensor.
  WINNOW_EXPORT static TensorLayout make_dense(DType dtype, std::span<const std::int64_t> shape,
                                               Device device);
  // Throws Error unless 0 <= begin <= end <= shape[dim].
  WINNOW_EXPORT TensorLayout sliced(int dim, std::int64_t begin, std::int64_t end) const;
  WINNOW_EXPORT TensorLayout transposed(int dim_a, int dim_b) const;
  WINNOW_EXPORT void check_host_access(DType wanted) const;
  // `data`; in place of a null pointer to no elements, which frameworks give, one that is not null:
  // behind the entry point a pointer alone says whether its tensor is present. Throws Error if
  // there are elements but no data.
  WINNOW_EXPORT const void* address(const void* data) const;
  std::span<const std::int64_t> sizes() const { return {shape.data(), size_t(rank)}; }
  std::int64_t numel() const {
    for (const std::int64_t size : sizes()) {
      if (size == 0) return 0;  // the other sizes may be anything
    }
    std::int64_t product = 1;
    for (const std::int64_t size : sizes()) product *= size;
    return product;
  }
};

}  // namespace detail

// A typed, strided view of memory that the caller owns and keeps alive during the call. Copying a
// view is cheap. Strides count elements and may be zero or negative; `data` points at element
// (0, ..., 0). A default-constructed view is absent; optional arguments are omitted that way. A
// view without elements is present, and its data() is not null.
template <class Void>
class BasicTensorView {
 public:
  BasicTensorView() = default;

  // A dense row-major view of `data`. Errors (winnow::Error): rank above kMaxRank, a negative size,
  // a byte count beyond 63 bits, null data with elements to point at.
  BasicTensorView(Void* data, DType dtype, std::span<const std::int64_t> shape, Device device = {})
      : BasicTensorView(data, detail::TensorLayout::make_dense(dtype, shape, device)) {}
  BasicTensorView(Void* data, DType dtype, std::initializer_list<std::int64_t> shape,
                  Device device = {})
      : BasicTensorView(data, dtype, std::span(shape.begin(), shape.size()), device) {}

  // The same with strides, in elements, one per dimension.
  BasicTensorView(Void* data, DType dtype, std::span<const std::int64_t> shape,
                  std::span<const std::int64_t> strides, Device device = {})
      : BasicTensorView(data, detail::TensorLayout::make(dtype, shape, strides, device)) {}
  BasicTensorView(Void* data, DType dtype, std::initializer_list<std::int64_t> shape,
                  std::initializer_list<std::int64_t> strides, Device device = {})
      : BasicTensorView(data, dtype, std::span(shape.begin(), shape.size()),
                        std::span(strides.begin(), strides.size()), device) {}

  // A writable view converts to a read-only one.
  template <class Other>
    requires(std::is_const_v<Void> && !std::is_const_v<Other>)
  BasicTensorView(const BasicTensorView<Other>& other)  // NOLINT: implicit on purpose
      : data_(other.data()), present_(other.present()), layout_(other.layout()) {}

  bool present() const { return present_; }
  Void* data() const { return data_; }
  DType dtype() const { return layout_.dtype; }
  Device device() const { return layout_.device; }
  int rank() const { return layout_.rank; }
  std::int64_t size(int dim) const { return layout_.shape[size_t(dim)]; }
  std::int64_t stride(int dim) const { return layout_.strides[size_t(dim)]; }
  std::span<const std::int64_t> shape() const { return layout_.sizes(); }
  std::span<const std::int64_t> strides() const { return {layout_.strides.data(), size_t(rank())}; }
  std::int64_t numel() const { return present_ ? layout_.numel() : 0; }
  const detail::TensorLayout& layout() const { return layout_; }

  // The rows [begin, end) of dimension `dim`, in the same memory. Errors: out of bounds.
  BasicTensorView slice(int dim, std::int64_t begin, std::int64_t end) const {
    BasicTensorView result = *this;
    result.layout_ = layout_.sliced(dim, begin, end);
    if (begin != 0 && result.numel() != 0) result.data_ = offset(begin * stride(dim));
    return result;
  }

  // The same memory with two dimensions exchanged.
  BasicTensorView transpose(int dim_a, int dim_b) const {
    BasicTensorView result = *this;
    result.layout_ = layout_.transposed(dim_a, dim_b);
    return result;
  }

  // Element access on the host, for programs and tests. Errors: T is not the dtype, the memory is
  // on a GPU. Indices are not checked.
  template <class T, std::integral... Index>
  auto& at(Index... index) const {
    layout_.check_host_access(dtype_of<T>);
    std::int64_t position = 0;
    int dim = 0;
    ((position += static_cast<std::int64_t>(index) * stride(dim++)), ...);
    using Element = std::conditional_t<std::is_const_v<Void>, const T, T>;
    return static_cast<Element*>(data_)[position];
  }

 private:
  BasicTensorView(Void* data, const detail::TensorLayout& layout)
      : data_(const_cast<Void*>(layout.address(data))), present_(true), layout_(layout) {}

  Void* offset(std::int64_t elements) const {
    using Byte = std::conditional_t<std::is_const_v<Void>, const char, char>;
    return static_cast<Byte*>(data_) + elements * size_of(layout_.dtype);
  }

  Void* data_ = nullptr;
  bool present_ = false;
  detail::TensorLayout layout_;
};

using TensorView = BasicTensorView<void>;
using ConstTensorView = BasicTensorView<const void>;

// "f32 [4, 64, 512] on cpu", with the strides if the view is not dense.
WINNOW_EXPORT std::string to_string(const ConstTensorView& view);

// A dense row-major tensor for programs that have no tensor type of their own. It owns its memory,
// which is zero-filled and aligned to 64 bytes, or borrows memory. It can be moved but not copied;
// clone() and to() copy.
class WINNOW_EXPORT Tensor {
 public:
  Tensor() = default;
  // Errors (winnow::Error): as for views; the allocation fails, the device cannot be used.
  Tensor(DType dtype, std::span<const std::int64_t> shape, Device device = {});
  Tensor(DType dtype, std::initializer_list<std::int64_t> shape, Device device = {})
      : Tensor(dtype, std::span(shape.begin(), shape.size()), device) {}

  // A tensor that refers to `data`, which must stay valid while `owner` is alive. The tensor holds
  // `owner` until it is destroyed or assigned to, and may release it on any thread. Errors: as for
  // views; `owner` is null.
  static Tensor borrow(std::shared_ptr<const void> owner, void* data, DType dtype,
                       std::span<const std::int64_t> shape, Device device = {});
  static Tensor borrow(std::shared_ptr<const void> owner, void* data, DType dtype,
                       std::initializer_list<std::int64_t> shape, Device device = {}) {
    return borrow(std::move(owner), data, dtype, std::span(shape.begin(), shape.size()), device);
  }

  // Returns a complete copy on `device`, after waiting for the work that is queued on that device.
  Tensor to(Device device) const;
  Tensor clone() const { return to(device()); }
  TensorView view() { return view_; }
  ConstTensorView view() const { return view_; }
  operator TensorView() { return view_; }             // NOLINT: implicit on purpose
  operator ConstTensorView() const { return view_; }  // NOLINT: implicit on purpose

  DType dtype() const { return view_.dtype(); }
  Device device() const { return view_.device(); }
  std::int64_t size(int dim) const { return view_.size(dim); }
  std::int64_t numel() const { return view_.numel(); }
  void* data() { return view_.data(); }
  const void* data() const { return view_.data(); }

  // All elements in row-major order. Errors: T is not the dtype, the memory is on a GPU.
  template <class T>
  std::span<T> values() {
    view_.layout().check_host_access(dtype_of<T>);
    return {static_cast<T*>(view_.data()), static_cast<std::size_t>(view_.numel())};
  }
  template <class T>
  std::span<const T> values() const {
    view_.layout().check_host_access(dtype_of<T>);
    return {static_cast<const T*>(view_.data()), static_cast<std::size_t>(view_.numel())};
  }

 private:
  struct Free {
    Device device;
    std::shared_ptr<const void> owner;  // of borrowed memory
    void operator()(void* memory) const;
  };
  std::unique_ptr<void, Free> memory_;
  TensorView view_;
};

}  // namespace winnow
