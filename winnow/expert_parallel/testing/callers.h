// Tensors of a caller in tests.
#pragma once

#include <algorithm>
#include <cstdint>

#include "winnow/core/tensor.h"
#include "winnow/expert_parallel/testing/place.h"

namespace winnow::expert_parallel {

// A caller's tensor: a copy of `from`, with rows further apart if asked for.
class Copy {
 public:
  Copy(const Place& place, const ConstTensorView& from, bool strided) : place_(place) {
    if (!from.present()) return;
    const std::int64_t gap = strided ? 3 : 0;
    storage_ = place.make(from.dtype(), {{from.size(0), from.size(1) + gap}});
    view_ = storage_.view().slice(1, 0, from.size(1));
    place.write(view_, from);
  }
  const TensorView& view() const { return view_; }
  void spoil() {
    if (storage_.numel() > 0) place_.spoil(storage_.view());
  }

 private:
  const Place& place_;
  Tensor storage_;
  TensorView view_;
};

// A tensor that dispatch writes to, with more rows than it needs; every bit is 1 before.
class Out {
 public:
  Out(const Place& place, DType dtype, std::int64_t rows, std::int64_t hidden, bool strided)
      : place_(place), rows_(rows) {
    storage_ = place.make(dtype, {{rows + kMore, hidden + (strided ? kMore : 0)}});
    view_ = storage_.view().slice(1, 0, hidden);
  }
  const TensorView& view() const { return view_; }
  // A copy of the rows that were asked for.
  Tensor take() const { return place_.copy(place_.to_host(view_.slice(0, 0, rows_))); }
  // How many bytes were changed beside and behind these rows.
  std::int64_t bytes_outside() const {
    return changed(storage_.view().slice(1, view_.size(1), storage_.size(1))) +
           changed(storage_.view().slice(0, rows_, rows_ + kMore));
  }

 private:
  static constexpr std::int64_t kMore = 3;

  std::int64_t changed(const ConstTensorView& part) const {
    const Tensor now = place_.to_host(part);
    const auto* bytes = static_cast<const unsigned char*>(now.data());
    const std::int64_t size = now.numel() * size_of(now.dtype());
    return size - std::count(bytes, bytes + size, 0xff);
  }

  const Place& place_;
  std::int64_t rows_;
  Tensor storage_;
  TensorView view_;
};

}  // namespace winnow::expert_parallel
