#include "winnow/core/check.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <compare>
#include <cstdlib>
#include <numeric>
#include <utility>

#include "winnow/core/foreign_dtype.h"

namespace winnow {
namespace {

std::string describe(std::span<const Dim> dims) {
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

// The dimensions of two elements or more, whose strides are followed, by stride and then by size.
class SteppingDims {
 public:
  struct Dimension {
    std::int64_t stride = 0, size = 0;  // the stride without its sign
    auto operator<=>(const Dimension&) const = default;
  };

  explicit SteppingDims(const detail::TensorLayout& layout) {
    for (int dim = 0; dim < layout.rank; ++dim) {
      if (layout.shape[dim] < 2) continue;
      const Dimension next{std::abs(layout.strides[dim]), layout.shape[dim]};
      int place = count_++;
      for (; place > 0 && next < dims_[place - 1]; --place) dims_[place] = dims_[place - 1];
      dims_[place] = next;
    }
  }
  const Dimension* begin() const { return dims_.data(); }
  const Dimension* end() const { return dims_.data() + count_; }

 private:
  std::array<Dimension, kMaxRank> dims_;
  int count_ = 0;
};

// The bytes of a tensor: runs without gaps of `run` bytes, at multiples of the strides from
// `begin`.
struct Runs : Range {
  std::int64_t run = 0;
  int rank = 0;
  std::array<std::int64_t, kMaxRank> strides{}, sizes{};  // in bytes, ascending; sizes of 2 or more
};

Runs runs_of(const Named& tensor) {
  const detail::TensorLayout& layout = *tensor.layout;
  Runs runs{range_of(tensor)};
  runs.run = size_of(layout.dtype);
  const SteppingDims dims(layout);
  for (const auto& [stride, size] : dims) {
    const std::int64_t bytes = stride * size_of(layout.dtype);
    if (runs.rank == 0 && bytes <= runs.run) {
      runs.run += bytes * (size - 1);
    } else {
      runs.strides[runs.rank] = bytes;
      runs.sizes[runs.rank++] = size;
    }
  }
  return runs;
}

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
  if (!a.meets(b)) return false;
  if (a.rank == 0 && b.rank == 0) return true;
  if (--steps < 0 || apart_by_residues(a, b)) return false;
  const bool halve_a = a.rank > 0 && (b.rank == 0 || a.end - a.begin >= b.end - b.begin);
  const Runs& halved = halve_a ? a : b;
  const Runs& other = halve_a ? b : a;
  return touch(half_of(halved, false), other, steps) || touch(half_of(halved, true), other, steps);
}

bool share_memory(const Named& a, const Named& b) {
  if (!range_of(a).meets(range_of(b))) return false;
  int steps = 4096;
  return touch(runs_of(a), runs_of(b), steps);
}

}  // namespace

Range range_of(const Named& tensor) {
  if (tensor.layout == nullptr || tensor.layout->numel() == 0) return {};
  const detail::TensorLayout& layout = *tensor.layout;
  const std::int64_t bytes = size_of(layout.dtype);
  const auto first = reinterpret_cast<std::uintptr_t>(tensor.data);
  Range range{first, first + static_cast<std::uintptr_t>(bytes)};
  for (int dim = 0; dim < layout.rank; ++dim) {
    const std::int64_t reach = layout.strides[dim] * (layout.shape[dim] - 1) * bytes;
    (reach < 0 ? range.begin : range.end) += static_cast<std::uintptr_t>(reach);
  }
  return range;
}

bool share_memory(const ConstTensorView& a, const ConstTensorView& b) {
  return share_memory(Named("", a), Named("", b));
}

void Check::apart(std::span<const Named> outputs, std::span<const Named> inputs) const {
  const auto check = [&](const Named& output, const Named& other) {
    if (!share_memory(output, other)) return;
    fail(output.argument, "memory apart from " + std::string(other.argument),
         "memory that both use");
  };
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    for (const Named& input : inputs) check(outputs[i], input);
    for (const Named& other : outputs.first(i)) check(outputs[i], other);
  }
}

void Check::fail(std::string_view argument, std::string wanted, std::string got) const {
  throw Error(ErrorCode::invalid_argument, std::string(operation_), std::string(argument),
              std::move(wanted), std::move(got));
}

void Check::that(bool holds, std::string_view argument, std::string_view wanted,
                 std::string_view got) const {
  if (!holds) fail(argument, std::string(wanted), std::string(got));
}

void Check::finite(std::string_view argument, std::optional<double> value, DType dtype) const {
  if (!value || std::isfinite(round_to_accumulator(dtype, *value))) return;
  fail(argument, "a finite number", std::to_string(*value));
}

void Check::unsupported(const std::string& message) const {
  throw Error(ErrorCode::unsupported, std::string(operation_), message);
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
                  std::span<const Dim> dims) const {
  if (!view.present()) fail(argument, "a tensor of shape " + describe(dims), "none");
  const bool same = std::equal(dims.begin(), dims.end(), view.shape().begin(), view.shape().end(),
                               [](const Dim& dim, std::int64_t size) { return dim.size == size; });
  if (!same) fail(argument, "shape " + describe(dims), describe(view.shape()));
}

void Check::dtype(std::string_view argument, const ConstTensorView& view,
                  std::span<const DType> allowed, std::span<const DType> on_gpu) const {
  const bool narrowed = on_gpu.size() > 0 && view.device().type == DeviceType::cuda;
  const std::span<const DType> taken = narrowed ? on_gpu : allowed;
  if (std::ranges::find(taken, view.dtype()) != taken.end()) return;
  std::string wanted;
  for (const DType dtype : taken) {
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
  const auto refuse = [&](std::string got) {
    fail(argument, "memory aligned to " + std::to_string(bytes) + " bytes", std::move(got));
  };
  // A division would cost more than all else here.
  const auto beyond = [below = static_cast<std::uint64_t>(bytes) - 1](auto number) {
    return static_cast<std::uint64_t>(number) & below;
  };
  const std::uint64_t rest = beyond(reinterpret_cast<std::uintptr_t>(view.data()));
  if (rest != 0) refuse("an address " + std::to_string(rest) + " bytes beyond");
  const std::int64_t element = size_of(view.dtype());
  if (bytes <= element) return;  // then every stride is a multiple
  for (int dim = 0; dim + 1 < view.rank(); ++dim) {
    if (view.size(dim) > 1 && beyond(view.stride(dim) * element) != 0) {
      refuse("strides " + describe(view.strides()));
    }
  }
}

void Check::distinct_elements(std::string_view argument, const ConstTensorView& view) const {
  if (view.numel() == 0) return;
  // Ordered by stride, each dimension must step over all that the smaller ones reach.
  std::int64_t reach = 0;
  for (const auto& [stride, size] : SteppingDims(view.layout())) {
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

void Check::input(std::string_view argument, const ConstTensorView& view, std::span<const Dim> dims,
                  std::span<const DType> allowed, Device device,
                  std::span<const DType> on_gpu) const {
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
