#include "winnow/testing/compare.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <optional>
#include <type_traits>

#include "winnow/core/dtype.h"
#include "winnow/core/error.h"

namespace winnow::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Appends the elements of one row of the last dimension.
template <class T>
void append_row(const void* data, std::int64_t count, std::int64_t stride,
                std::vector<double>& values) {
  const T* element = static_cast<const T*>(data);
  const std::size_t before = values.size();
  values.resize(before + static_cast<std::size_t>(count));
  double* const to = values.data() + before;
  for (std::int64_t i = 0; i < count; ++i) {
    if constexpr (std::is_integral_v<T> || std::is_same_v<T, double>) {
      to[i] = static_cast<double>(element[i * stride]);
    } else {
      to[i] = static_cast<double>(static_cast<float>(element[i * stride]));
    }
  }
}

void append_row(const ConstTensorView& row, std::vector<double>& values) {
  const std::int64_t count = row.rank() == 0 ? 1 : row.size(0);
  const std::int64_t stride = row.rank() == 0 ? 1 : row.stride(0);
  switch (row.dtype()) {
    case DType::f64:
      return append_row<double>(row.data(), count, stride, values);
    case DType::f32:
      return append_row<float>(row.data(), count, stride, values);
    case DType::f16:
      return append_row<Half>(row.data(), count, stride, values);
    case DType::bf16:
      return append_row<BFloat16>(row.data(), count, stride, values);
    case DType::f8_e4m3:
      return append_row<Float8E4M3>(row.data(), count, stride, values);
    case DType::i32:
      return append_row<std::int32_t>(row.data(), count, stride, values);
    case DType::i64:
      return append_row<std::int64_t>(row.data(), count, stride, values);
    case DType::u8:
      return append_row<std::uint8_t>(row.data(), count, stride, values);
  }
}

// The element `index` of dimension 0 as a view of one dimension less.
ConstTensorView inner(const ConstTensorView& view, std::int64_t index) {
  const ConstTensorView slice = view.slice(0, index, index + 1);
  return {slice.data(), view.dtype(), view.shape().subspan(1), view.strides().subspan(1),
          view.device()};
}

void append(const ConstTensorView& view, std::vector<double>& values) {
  if (view.numel() == 0) return;
  if (view.rank() <= 1) return append_row(view, values);
  for (std::int64_t i = 0; i < view.size(0); ++i) append(inner(view, i), values);
}

void require_readable(const ConstTensorView& view) {
  if (view.present() && view.device().type == DeviceType::cpu) return;
  throw Error(ErrorCode::invalid_argument, "testing::read", "view", "a tensor on the host",
              to_string(view));
}

std::string number(double value, int digits = 9) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.*g", digits, value);
  return text;
}

// "[3, 0, 17]" for the element at `position` in row-major order.
std::string place(std::span<const std::int64_t> shape, std::size_t position) {
  std::string text;
  for (std::size_t dim = shape.size(); dim-- > 0;) {
    const auto size = static_cast<std::size_t>(std::max<std::int64_t>(shape[dim], 1));
    text = std::to_string(position % size) + (text.empty() ? "" : ", ") + text;
    position /= size;
  }
  return "[" + text + "]";
}

bool same_special(double actual, double expected) {
  if (std::isnan(expected)) return std::isnan(actual);
  if (std::isinf(expected)) return actual == expected;
  return std::isfinite(actual);
}

double largest_finite(std::span<const double> values) {
  double largest = 0;
  for (const double value : values) {
    if (std::isfinite(value)) largest = std::max(largest, std::abs(value));
  }
  return largest;
}

// What errors are relative to: one number for each part, all of the same length.
std::vector<double> magnitudes_of(std::span<const double> expected,
                                  std::span<const std::int64_t> shape, RelativeTo relative_to) {
  if (expected.empty()) return {};
  if (relative_to == RelativeTo::nothing) return {1};
  std::size_t row = expected.size();
  if (relative_to == RelativeTo::row && !shape.empty()) {
    row = static_cast<std::size_t>(shape.back());
  }
  std::vector<double> magnitudes;
  for (std::size_t begin = 0; begin < expected.size(); begin += row) {
    magnitudes.push_back(largest_finite(expected.subspan(begin, row)));
  }
  return magnitudes;
}

double cosine_distance(std::span<const double> a, std::span<const double> b) {
  double ab = 0, aa = 0, bb = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!std::isfinite(a[i]) || !std::isfinite(b[i])) continue;  // checked as specials
    ab += a[i] * b[i];
    aa += a[i] * a[i];
    bb += b[i] * b[i];
  }
  if (aa == 0 && bb == 0) return 0;
  if (aa == 0 || bb == 0) return 1;
  return 1 - ab / std::sqrt(aa * bb);
}

}  // namespace

namespace {

// `at`: becomes the position of the element that the detail names.
Comparison compare(std::string_view what, std::span<const double> actual,
                   std::span<const double> expected, std::span<const std::int64_t> shape,
                   const Tolerance& tolerance, std::optional<std::size_t>& at) {
  Comparison result{std::string(what), kInfinity, tolerance.error, false, ""};
  const auto differ = [&](std::size_t i) {
    at = i;
    // All digits where nine do not tell them apart.
    const int digits = number(actual[i]) == number(expected[i]) ? 17 : 9;
    return " at " + place(shape, i) + ": got " + number(actual[i], digits) + ", want " +
           number(expected[i], digits);
  };
  if (actual.size() != expected.size()) {
    result.detail = std::to_string(actual.size()) + " elements where " +
                    std::to_string(expected.size()) + " are expected";
    return result;
  }

  std::size_t wrong_specials = 0, first_wrong = 0;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    if (same_special(actual[i], expected[i])) continue;
    if (wrong_specials++ == 0) first_wrong = i;
  }
  if (wrong_specials != 0) {
    result.detail = std::to_string(wrong_specials) + " of " + std::to_string(actual.size()) +
                    " elements differ in being finite, inf or NaN, first" + differ(first_wrong);
    return result;
  }

  double worst = 0;
  std::size_t worst_at = 0;
  const std::vector<double> magnitudes = magnitudes_of(expected, shape, tolerance.relative_to);
  const std::size_t row = expected.size() / std::max<std::size_t>(magnitudes.size(), 1);
  for (std::size_t i = 0; i < actual.size(); ++i) {
    if (!std::isfinite(expected[i]) || actual[i] == expected[i]) continue;
    const double difference = std::abs(actual[i] - expected[i]);
    const double magnitude = magnitudes[i / row];
    const double error = magnitude == 0 ? kInfinity : difference / magnitude;
    if (error > worst) {
      worst = error;
      worst_at = i;
    }
  }
  result.error = worst;
  result.passed = worst <= tolerance.error;
  if (worst > 0) result.detail = "worst" + differ(worst_at);
  if (tolerance.cosine != 0) {
    const double distance = cosine_distance(actual, expected);
    if (!(distance <= tolerance.cosine)) {
      result.passed = false;
      result.detail += (result.detail.empty() ? "" : "; ") + std::string("cosine distance ") +
                       number(distance) + " beyond " + number(tolerance.cosine);
    }
  }
  return result;
}

// The element at `position` in row-major order.
const void* element_of(const ConstTensorView& view, std::size_t position) {
  std::int64_t offset = 0;
  for (std::size_t dim = view.shape().size(); dim-- > 0;) {
    const auto size = static_cast<std::size_t>(view.shape()[dim]);
    offset += static_cast<std::int64_t>(position % size) * view.strides()[dim];
    position /= size;
  }
  return static_cast<const char*>(view.data()) + offset * size_of(view.dtype());
}

}  // namespace

Comparison compare(std::string_view what, std::span<const double> actual,
                   std::span<const double> expected, std::span<const std::int64_t> shape,
                   const Tolerance& tolerance) {
  std::optional<std::size_t> at;
  return compare(what, actual, expected, shape, tolerance, at);
}

Comparison compare(std::string_view what, const ConstTensorView& actual,
                   std::span<const double> expected, const Tolerance& tolerance,
                   std::span<const std::int64_t> rows) {
  std::optional<std::size_t> at;
  std::vector<std::int64_t> shape(actual.shape().begin(), actual.shape().end());
  if (!rows.empty()) shape[0] = static_cast<std::int64_t>(rows.size());
  Comparison result = compare(what, rows.empty() ? read(actual) : read_rows(actual, rows), expected,
                              shape, tolerance, at);
  if (at.has_value()) {
    std::size_t position = *at;
    if (!rows.empty()) {
      const std::size_t row = expected.size() / rows.size();
      position = static_cast<std::size_t>(rows[position / row]) * row + position % row;
    }
    result.element = element_of(actual, position);
  }
  if (rows.empty()) return result;
  if (!result.detail.empty()) {
    result.detail +=
        " (dimension 0 counts the chosen rows, the first is " + std::to_string(rows.front()) + ")";
  }
  return result;
}

std::vector<double> allowed_errors(std::span<const double> expected,
                                   std::span<const std::int64_t> shape,
                                   const Tolerance& tolerance) {
  const std::vector<double> magnitudes = magnitudes_of(expected, shape, tolerance.relative_to);
  const std::size_t row = expected.size() / std::max<std::size_t>(magnitudes.size(), 1);
  std::vector<double> errors(expected.size());
  for (std::size_t i = 0; i < errors.size(); ++i) errors[i] = tolerance.error * magnitudes[i / row];
  return errors;
}

std::vector<double> read(const ConstTensorView& view) {
  require_readable(view);
  std::vector<double> values;
  values.reserve(static_cast<std::size_t>(view.numel()));
  append(view, values);
  return values;
}

std::vector<double> read_rows(const ConstTensorView& view, std::span<const std::int64_t> rows) {
  require_readable(view);
  std::vector<double> values;
  for (const std::int64_t row : rows) append(view.slice(0, row, row + 1), values);
  return values;
}

}  // namespace winnow::testing
