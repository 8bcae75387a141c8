#include "winnow/core/check.h"

#include <algorithm>
#include <cstdlib>
#include <utility>
#include <vector>

namespace winnow {
namespace {

std::string describe(std::initializer_list<Dim> dims) {
  std::string text = "[";
  for (const Dim& dim : dims) {
    if (text.size() > 1) text += ", ";
    const std::string size = std::to_string(dim.size);
    text += dim.name == size || dim.name.empty() ? size : std::string(dim.name) + "=" + size;
  }
  return text + "]";
}

std::string describe(std::span<const std::int64_t> values) {
  std::string text = "[";
  for (const std::int64_t value : values) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(value);
  }
  return text + "]";
}

}  // namespace

void Check::fail(std::string_view argument, std::string wanted, std::string got) const {
  throw Error(ErrorCode::invalid_argument, operation_, std::string(argument), std::move(wanted),
              std::move(got));
}

void Check::that(bool holds, std::string_view argument, std::string_view wanted,
                 std::string_view got) const {
  if (!holds) fail(argument, std::string(wanted), std::string(got));
}

void Check::unsupported(const std::string& message) const {
  throw Error(ErrorCode::unsupported, operation_, message);
}

void Check::rank(std::string_view argument, const ConstTensorView& view, int rank,
                 std::string_view dims) const {
  if (!view.present()) fail(argument, "a tensor " + std::string(dims), "none");
  if (view.rank() != rank) {
    fail(argument, std::to_string(rank) + " dimensions " + std::string(dims),
         "shape " + describe(view.shape()));
  }
}

void Check::shape(std::string_view argument, const ConstTensorView& view,
                  std::initializer_list<Dim> dims) const {
  if (!view.present()) fail(argument, "a tensor of shape " + describe(dims), "none");
  const bool same = std::equal(dims.begin(), dims.end(), view.shape().begin(), view.shape().end(),
                               [](const Dim& dim, std::int64_t size) { return dim.size == size; });
  if (!same) fail(argument, "shape " + describe(dims), describe(view.shape()));
}

void Check::dtype(std::string_view argument, const ConstTensorView& view,
                  std::initializer_list<DType> allowed) const {
  std::string wanted;
  for (const DType dtype : allowed) {
    if (dtype == view.dtype()) return;
    if (wanted == to_string(dtype)) continue;  // not "f32 or f32"
    if (!wanted.empty()) wanted += " or ";
    wanted += to_string(dtype);
  }
  fail(argument, "dtype " + wanted, std::string(to_string(view.dtype())));
}

void Check::contiguous_rows(std::string_view argument, const ConstTensorView& view) const {
  const int last = view.rank() - 1;
  if (last < 0 || view.size(last) < 2 || view.stride(last) == 1 || view.numel() == 0) return;
  fail(argument, "stride 1 in the last dimension", "strides " + describe(view.strides()));
}

void Check::aligned(std::string_view argument, const ConstTensorView& view,
                    std::int64_t bytes) const {
  if (view.numel() == 0) return;
  const std::string wanted = "memory aligned to " + std::to_string(bytes) + " bytes";
  const auto address = reinterpret_cast<std::uintptr_t>(view.data());
  if (address % static_cast<std::uintptr_t>(bytes) != 0) {
    fail(argument, wanted,
         "an address " + std::to_string(address % static_cast<std::uintptr_t>(bytes)) +
             " bytes beyond");
  }
  for (int dim = 0; dim + 1 < view.rank(); ++dim) {
    if (view.size(dim) > 1 && view.stride(dim) * size_of(view.dtype()) % bytes != 0) {
      fail(argument, wanted, "strides " + describe(view.strides()));
    }
  }
}

void Check::distinct_elements(std::string_view argument, const ConstTensorView& view) const {
  if (view.numel() == 0) return;
  // Ordered by stride, each dimension must step over all that the smaller ones reach.
  std::vector<std::pair<std::int64_t, std::int64_t>> dims;  // stride, size
  for (int dim = 0; dim < view.rank(); ++dim) {
    if (view.size(dim) > 1) dims.emplace_back(std::abs(view.stride(dim)), view.size(dim));
  }
  std::sort(dims.begin(), dims.end());
  std::int64_t reach = 0;
  for (const auto& [stride, size] : dims) {
    if (stride <= reach) {
      fail(argument, "an output whose elements do not share memory",
           "shape " + describe(view.shape()) + " with strides " + describe(view.strides()));
    }
    reach += stride * (size - 1);
  }
}

void Check::device(std::string_view argument, const ConstTensorView& view, Device device) const {
  if (view.device() == device) return;
  fail(argument, "device " + to_string(device), to_string(view.device()));
}

void Check::input(std::string_view argument, const ConstTensorView& view,
                  std::initializer_list<Dim> dims, std::initializer_list<DType> allowed,
                  Device device) const {
  shape(argument, view, dims);
  dtype(argument, view, allowed);
  this->device(argument, view, device);
  contiguous_rows(argument, view);
  aligned(argument, view, size_of(view.dtype()));
}

void Check::output(std::string_view argument, const TensorView& view,
                   std::initializer_list<Dim> dims, std::initializer_list<DType> allowed,
                   Device device) const {
  input(argument, view, dims, allowed, device);
  distinct_elements(argument, view);
}

}  // namespace winnow
