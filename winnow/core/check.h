// The checks that public functions make at the entry point. Internal.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "winnow/core/error.h"
#include "winnow/core/export.h"
#include "winnow/core/tensor.h"

namespace winnow {

// Whether a byte belongs to both views; absent and empty ones share nothing. The ranges from first
// to last byte are compared first, which decides almost every call. Of views whose ranges meet, the
// runs of bytes without gaps are compared: residues of the strides tell columns of one buffer
// apart, and halving the views finds runs that touch. This is exact up to 4096 steps; views so
// intertwined that these do not suffice count as apart, so that no sound call is refused.
WINNOW_EXPORT bool share_memory(const ConstTensorView& a, const ConstTensorView& b);

// An argument and its name. Refers to the view, which may be absent.
struct Named {
  Named() = default;
  template <class View>
  Named(std::string_view name, const View& view)
      : argument(name), data(view.data()), layout(view.present() ? &view.layout() : nullptr) {}
  std::string_view argument;
  const void* data = nullptr;
  const detail::TensorLayout* layout = nullptr;  // null: absent
};

// From the first byte of a tensor to the one after the last; empty if it is absent or has no
// elements.
struct Range {
  std::uintptr_t begin = 0, end = 0;
  bool meets(const Range& other) const { return begin < other.end && other.begin < end; }
};
Range range_of(const Named& tensor);

// A dimension that a shape must have: its name in the contract and its size in this call.
struct Dim {
  std::string_view name;
  std::int64_t size;
};

// Checks the arguments of one call. A failed check throws an Error that names the operation and the
// argument and gives the expected and the actual value.
class WINNOW_EXPORT Check {
 public:
  // Refers to the name.
  explicit Check(std::string_view operation) : operation_(operation) {}
  explicit Check(const char* operation) : operation_(operation) {}
  explicit Check(std::string&&) = delete;

  // The tensor is present and has as many dimensions as `dims`, which is its shape in words:
  // "[s_q, h_q, d_qk]".
  void rank(std::string_view argument, const ConstTensorView& view, int rank,
            std::string_view dims) const;
  void shape(std::string_view argument, const ConstTensorView& view,
             std::span<const Dim> dims) const;
  void shape(std::string_view argument, const ConstTensorView& view,
             std::initializer_list<Dim> dims) const {
    shape(argument, view, std::span(dims));
  }
  // `on_gpu`: those of them that the GPU backends take, if not all.
  void dtype(std::string_view argument, const ConstTensorView& view, std::span<const DType> allowed,
             std::span<const DType> on_gpu) const;
  void dtype(std::string_view argument, const ConstTensorView& view,
             std::initializer_list<DType> allowed, std::initializer_list<DType> on_gpu = {}) const {
    dtype(argument, view, std::span(allowed), std::span(on_gpu));
  }
  // Stride 1 in the last dimension (unless it has fewer than two elements).
  void contiguous_rows(std::string_view argument, const ConstTensorView& view) const;
  // The pointer and every stride over more than one element are multiples of `bytes`, a power of
  // two.
  void aligned(std::string_view argument, const ConstTensorView& view, std::int64_t bytes) const;
  // No two elements of an output share memory.
  void distinct_elements(std::string_view argument, const ConstTensorView& view) const;
  // No output shares memory with an input or another output. Not for dry runs, whose tensors may
  // have no memory of their own.
  void apart(std::span<const Named> outputs, std::span<const Named> inputs) const;
  void apart(std::initializer_list<Named> outputs, std::initializer_list<Named> inputs) const {
    apart(std::span(outputs), std::span(inputs));
  }
  void device(std::string_view argument, const ConstTensorView& view, Device device) const;
  // A number, as it goes into sums over `dtype`, is finite where it is given.
  void finite(std::string_view argument, std::optional<double> value, DType dtype) const;
  // Any other rule: throws unless `holds`.
  void that(bool holds, std::string_view argument, std::string_view wanted,
            std::string_view got) const;
  // Throws an Error (unsupported): the contract allows the call, but its backend cannot run it.
  [[noreturn]] void unsupported(const std::string& message) const;

  // The checks that most arguments need: shape, dtype, device, contiguous rows, natural alignment.
  void input(std::string_view argument, const ConstTensorView& view, std::span<const Dim> dims,
             std::span<const DType> allowed, Device device, std::span<const DType> on_gpu) const;
  void input(std::string_view argument, const ConstTensorView& view,
             std::initializer_list<Dim> dims, std::initializer_list<DType> allowed, Device device,
             std::initializer_list<DType> on_gpu = {}) const {
    input(argument, view, std::span(dims), std::span(allowed), device, std::span(on_gpu));
  }
  // The same, and distinct elements.
  void output(std::string_view argument, const TensorView& view, std::initializer_list<Dim> dims,
              std::initializer_list<DType> allowed, Device device) const;
  // The `workspace` that a caller passes to a GPU backend: u8 on `device`, aligned to 256 bytes,
  // and at least `bytes` of them.
  void workspace(const TensorView& view, std::int64_t bytes, Device device) const;

 private:
  [[noreturn]] void fail(std::string_view argument, std::string wanted, std::string got) const;
  std::string_view operation_;
};

}  // namespace winnow
