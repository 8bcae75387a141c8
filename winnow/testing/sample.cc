#include "winnow/testing/sample.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "winnow/core/error.h"
#include "winnow/testing/compare.h"

namespace winnow::testing {
namespace {

// The element at `position` in row-major order.
double element(const ConstTensorView& view, std::int64_t position) {
  std::int64_t offset = 0;
  for (int dim = view.rank(); dim-- > 0;) {
    offset += position % view.size(dim) * view.stride(dim);
    position /= view.size(dim);
  }
  const auto* data = static_cast<const char*>(view.data()) + offset * size_of(view.dtype());
  return read(ConstTensorView(data, view.dtype(), {}, {})).front();
}

bool agree(double actual, double recorded, double tolerance) {
  if (std::isnan(recorded)) return std::isnan(actual);
  if (actual == recorded) return true;
  return std::isfinite(actual) && std::isfinite(recorded) &&
         std::abs(actual - recorded) <= tolerance;
}

}  // namespace

std::int64_t sample_step(std::int64_t numel) {
  return (numel + kMostSampled - 1) / kMostSampled | 1;
}

std::int64_t sample_count(std::int64_t numel) {
  const std::int64_t step = sample_step(numel);
  return (numel + step - 1) / step;
}

Sample sample(std::string_view what, const ConstTensorView& output,
              std::span<const double> tolerances) {
  const std::int64_t numel = output.numel();
  if (static_cast<std::int64_t>(tolerances.size()) != numel) {
    throw Error(ErrorCode::invalid_argument, "testing::sample", "tolerances",
                std::to_string(numel) + " elements", std::to_string(tolerances.size()));
  }
  Sample taken{std::string(what), output.dtype(), {}, {}, {}};
  taken.shape.assign(output.shape().begin(), output.shape().end());
  for (std::int64_t i = 0; i < numel; i += sample_step(numel)) {
    taken.values.push_back(element(output, i));
    taken.tolerances.push_back(tolerances[static_cast<std::size_t>(i)]);
  }
  return taken;
}

Comparison compare(const Sample& actual, const Sample& recorded) {
  Comparison result{actual.what, 0, 1, false, ""};  // the error is in units of the tolerance
  if (actual.what != recorded.what || actual.dtype != recorded.dtype ||
      actual.shape != recorded.shape || actual.values.size() != recorded.values.size()) {
    result.error = std::numeric_limits<double>::infinity();
    result.detail = "the recorded " + recorded.what + " has another name, dtype or shape";
    return result;
  }
  std::int64_t wrong = 0;
  for (std::size_t i = 0; i < actual.values.size(); ++i) {
    const double got = actual.values[i], want = recorded.values[i], far = actual.tolerances[i];
    if (std::isfinite(got) && std::isfinite(want) && far > 0) {
      result.error = std::max(result.error, std::abs(got - want) / far);
    }
    if (agree(got, want, far) || wrong++ != 0) continue;
    result.detail = "at sample " + std::to_string(i) + ": got " + std::to_string(got) +
                    ", recorded " + std::to_string(want) + ", tolerance " + std::to_string(far);
  }
  result.passed = wrong == 0;
  if (!result.passed) result.detail = std::to_string(wrong) + " differ, first " + result.detail;
  return result;
}

}  // namespace winnow::testing
