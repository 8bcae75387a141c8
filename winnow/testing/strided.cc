#include "winnow/testing/strided.h"

#include <string>

#include "winnow/testing/generate.h"
#include "winnow/testing/sample.h"

namespace winnow::testing {

StridedTensor make_tensor(DType dtype, const std::vector<std::int64_t>& shape, Layout layout,
                          const Gaps& gaps) {
  const int outer = static_cast<int>(shape.size()) - gaps.dense;  // without the dense dimensions
  const auto gap = [&](int dim) { return dim < outer ? 1 : gaps.length; };
  std::vector<std::int64_t> whole = shape;
  if (layout != Layout::dense) {
    for (int dim = 1; dim <= outer; ++dim) whole[static_cast<std::size_t>(dim)] += 2 * gap(dim);
  }
  StridedTensor tensor{Tensor(dtype, whole), {}};
  fill_unwritten(tensor.storage);
  tensor.view = tensor.storage.view();
  if (layout == Layout::dense) return tensor;
  for (int dim = 1; dim <= outer; ++dim) {
    tensor.view = tensor.view.slice(dim, gap(dim), gap(dim) + shape[static_cast<std::size_t>(dim)]);
  }
  if (layout == Layout::wide || tensor.view.numel() == 0) return tensor;

  // reversed: start at the last element of each outer dimension; broadcast: stride 0 in the first.
  auto* data = static_cast<char*>(tensor.view.data());
  std::vector<std::int64_t> strides(tensor.view.strides().begin(), tensor.view.strides().end());
  for (int dim = 0; dim < outer; ++dim) {
    std::int64_t& stride = strides[static_cast<std::size_t>(dim)];
    if (layout == Layout::reversed) {
      data += (shape[static_cast<std::size_t>(dim)] - 1) * stride * size_of(dtype);
      stride = -stride;
    } else if (dim == 0) {
      stride = 0;
    }
  }
  tensor.view = TensorView(data, dtype, shape, strides);
  return tensor;
}

StridedTensor make_output(DType dtype, const std::vector<std::int64_t>& shape, Layout layout,
                          const Gaps& gaps) {
  return make_tensor(dtype, shape, layout == Layout::broadcast ? Layout::wide : layout, gaps);
}

StridedTensor on(Device device, const StridedTensor& tensor) {
  if (!tensor.view.present()) return {};
  StridedTensor copy{tensor.storage.to(device), {}};
  const auto offset = static_cast<const char*>(tensor.view.data()) -
                      static_cast<const char*>(tensor.storage.data());
  copy.view = TensorView(static_cast<char*>(copy.storage.data()) + offset, tensor.view.dtype(),
                         tensor.view.shape(), tensor.view.strides(), device);
  return copy;
}

Comparison check_written(std::string_view what, const StridedTensor& output) {
  const std::int64_t missing = count_unwritten(output.view);
  const std::int64_t gaps = output.storage.numel() - output.view.numel();
  const std::int64_t outside = gaps + missing - count_unwritten(output.storage.view());
  Comparison result{std::string(what) + " written", 0, 0, false, ""};
  result.error = static_cast<double>(missing + outside);
  result.passed = missing == 0 && outside == 0;
  if (!result.passed) {
    result.detail = std::to_string(missing) + " elements were not written, " +
                    std::to_string(outside) + " outside of the tensor were";
  }
  return result;
}

void compare_output(CaseOutcome& outcome, std::string_view what, const StridedTensor& output,
                    std::span<const double> expected, const Tolerance& tolerance,
                    std::span<const std::int64_t> rows) {
  outcome.comparisons.push_back(check_written(what, output));
  outcome.comparisons.push_back(compare(what, output.view, expected, tolerance, rows));
  if (static_cast<std::int64_t>(expected.size()) != output.view.numel()) return;
  outcome.samples.push_back(
      sample(what, output.view, allowed_errors(expected, output.view.shape(), tolerance)));
}

void compare_bytes(CaseOutcome& outcome, std::string_view what, const Tensor& actual,
                   const Tensor& expected) {
  const std::int64_t shape[] = {actual.numel() * size_of(actual.dtype())};
  const auto* a = static_cast<const unsigned char*>(actual.data());
  const auto* b = static_cast<const unsigned char*>(expected.data());
  Comparison result{std::string(what), 0, 0, false, ""};
  for (std::int64_t i = 0; i < shape[0]; ++i) {
    if (a[i] == b[i]) continue;
    if (result.error++ == 0) result.detail = "first differing byte: " + std::to_string(i);
  }
  result.passed = result.error == 0;
  outcome.comparisons.push_back(result);
  outcome.samples.push_back(sample(what, ConstTensorView(a, DType::u8, shape),
                                   std::vector<double>(static_cast<std::size_t>(shape[0]))));
}

}  // namespace winnow::testing
