#include "winnow/core/check.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <numeric>
#include <utility>
#include <vector>

#include "winnow/core/foreign_dtype.h"

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

// The bytes of a tensor: runs without gaps of `run` bytes, at multiples of the strides from
// `begin`.
struct Runs {
  std::uintptr_t begin = 0, end = 0;  // the first byte, and the one after the last
  std::int64_t run = 0;
  int rank = 0;
  std::array<std::int64_t, kMaxRank> strides{}, sizes{};  // in bytes, ascending; sizes of 2 or more
};

// Of a tensor with elements: only begin and end, or everything.
Runs range_of(const void* data, const detail::TensorLayout& layout) {
  Runs runs;
  runs.begin = runs.end = reinterpret_cast<std::uintptr_t>(data);
  runs.run = size_of(layout.dtype);
  for (int dim = 0; dim < layout.rank; ++dim) {
    const std::int64_t reach = layout.strides[dim] * (layout.shape[dim] - 1) * runs.run;
    (reach < 0 ? runs.begin : runs.end) += static_cast<std::uintptr_t>(reach);
  }
  runs.end += static_cast<std::uintptr_t>(runs.run);
  return runs;
}

Runs runs_of(const void* data, const detail::TensorLayout& layout) {
  Runs runs = range_of(data, layout);
  std::array<std::pair<std::int64_t, std::int64_t>, kMaxRank> dims{};  // stride, size
  int count = 0;
  for (int dim = 0; dim < layout.rank; ++dim) {
    // The stride of a single entry is never followed: it may have any value.
    if (layout.shape[dim] < 2 || layout.strides[dim] == 0) continue;
    const std::int64_t stride = std::abs(layout.strides[dim]) * size_of(layout.dtype);
    int place = count++;  // by stride, then by size
    for (; place > 0 && std::pair(stride, layout.shape[dim]) < dims[place - 1]; --place) {
      dims[place] = dims[place - 1];
    }
    dims[place] = {stride, layout.shape[dim]};
  }
  for (int dim = 0; dim < count; ++dim) {
    const auto [stride, size] = dims[dim];
    if (runs.rank == 0 && stride <= runs.run) {
      runs.run += stride * (size - 1);
    } else {
      runs.strides[runs.rank] = stride;
      runs.sizes[runs.rank++] = size;
    }
  }
  return runs;
}

bool ranges_meet(const Runs& a, const Runs& b) { return a.begin < b.end && b.begin < a.end; }

// Whether the strides alone keep the runs apart, as they do for columns of one buffer.
bool apart_by_residues(const Runs& a, const Runs& b) {
  std::int64_t step = 0;
  for (int dim = 0; dim < a.rank; ++dim) step = std::gcd(step, a.strides[dim]);
  for (int dim = 0; dim < b.rank; ++dim) step = std::gcd(step, b.strides[dim]);
  const bool behind = b.begin < a.begin;
  std::int64_t distance =
      static_cast<std::int64_t>(behind ? a.begin - b.begin : b.begin - a.begin) % step;
  if (behind && distance != 0) distance = step - distance;
  return a.run <= distance && b.run <= step - distance;
}

// One half of the runs along the largest stride.
Runs half_of(Runs runs, bool upper) {
  std::int64_t& size = runs.sizes[runs.rank - 1];
  const std::int64_t stride = runs.strides[runs.rank - 1], low = size / 2;
  if (upper) {
    runs.begin += static_cast<std::uintptr_t>(low * stride);
  } else {
    runs.end -= static_cast<std::uintptr_t>((size - low) * stride);
  }
  size = upper ? size - low : low;
  if (size == 1) --runs.rank;
  return runs;
}

bool touch(const Runs& a, const Runs& b, int& steps) {
  if (!ranges_meet(a, b)) return false;
  if (a.rank == 0 && b.rank == 0) return true;
  if (--steps < 0 || apart_by_residues(a, b)) return false;
  const bool halve_a = a.rank > 0 && (b.rank == 0 || a.end - a.begin >= b.end - b.begin);
  const Runs& halved = halve_a ? a : b;
  const Runs& other = halve_a ? b : a;
  return touch(half_of(halved, false), other, steps) || touch(half_of(halved, true), other, steps);
}

bool share_memory(const Named& a, const Named& b) {
  if (a.layout == nullptr || b.layout == nullptr || a.layout->numel() == 0 ||
      b.layout->numel() == 0) {
    return false;
  }
  if (!ranges_meet(range_of(a.data, *a.layout), range_of(b.data, *b.layout))) return false;
  int steps = 4096;
  return touch(runs_of(a.data, *a.layout), runs_of(b.data, *b.layout), steps);
}

}  // namespace

bool share_memory(const ConstTensorView& a, const ConstTensorView& b) {
  return share_memory(Named("", a), Named("", b));
}

void Check::apart(std::initializer_list<Named> outputs, std::initializer_list<Named> inputs) const {
  const auto check = [&](const Named& output, const Named& other) {
    if (!share_memory(output, other)) return;
    fail(output.argument, "memory apart from " + std::string(other.argument),
         "memory that both use");
  };
  for (const Named* output = outputs.begin(); output != outputs.end(); ++output) {
    for (const Named& input : inputs) check(*output, input);
    for (const Named* other = outputs.begin(); other != output; ++other) check(*output, *other);
  }
}

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
                  std::initializer_list<DType> allowed, std::initializer_list<DType> on_gpu) const {
  const bool narrowed = on_gpu.size() > 0 && view.device().type == DeviceType::cuda;
  std::string wanted;
  for (const DType dtype : narrowed ? on_gpu : allowed) {
    if (dtype == view.dtype()) return;
    if (wanted == to_string(dtype)) continue;  // not "f32 or f32"
    if (!wanted.empty()) wanted += " or ";
    wanted += to_string(dtype);
  }
  const std::string name = name_of(view.dtype());
  const bool on_cpu = std::find(allowed.begin(), allowed.end(), view.dtype()) != allowed.end();
  if (narrowed && on_cpu) wanted += " on a GPU (the CPU takes " + name + ")";
  fail(argument, "dtype " + wanted, name);
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
                  Device device, std::initializer_list<DType> on_gpu) const {
  shape(argument, view, dims);
  dtype(argument, view, allowed, on_gpu);
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

void Check::workspace(const TensorView& view, std::int64_t bytes, Device device) const {
  input("workspace", view, {{"bytes", view.numel()}}, {DType::u8}, device);
  aligned("workspace", view, 256);
  that(view.numel() >= bytes, "workspace", std::to_string(bytes) + " bytes or more",
       std::to_string(view.numel()));
}

}  // namespace winnow
