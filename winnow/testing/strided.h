// Tensors whose memory has gaps, and whether an operation kept to its part of one.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "winnow/core/tensor.h"
#include "winnow/testing/compare.h"
#include "winnow/testing/operation.h"

namespace winnow::testing {

enum class Layout {
  dense,
  wide,       // a slice of a wider tensor in every dimension but the first
  reversed,   // the same with negative outer strides
  broadcast,  // as wide with stride 0 in the first dimension
};

// A tensor with its memory, which may be more than the view shows.
struct StridedTensor {
  Tensor storage;
  TensorView view;
};

// The form of the gaps. The last `dense` dimensions are without any but for the first of them,
// which has `length` before and after it; dimensions further out have one before and after.
struct Gaps {
  int dense = 1;
  std::int64_t length = 32;  // a row stays aligned to 16 bytes
};

// Memory that nobody has written yet (see fill_unwritten), as are the gaps.
StridedTensor make_tensor(DType dtype, const std::vector<std::int64_t>& shape, Layout layout,
                          const Gaps& gaps = {});
// An output never has stride 0: broadcast gives wide.
StridedTensor make_output(DType dtype, const std::vector<std::int64_t>& shape, Layout layout,
                          const Gaps& gaps = {});

// A copy on another device, gaps included. Absent stays absent.
StridedTensor on(Device device, const StridedTensor& tensor);

// That every element of an output was written and nothing around it.
Comparison check_written(std::string_view what, const StridedTensor& output);

// Adds check_written and compare to the outcome, and a sample where all of the output is compared.
void compare_output(CaseOutcome& outcome, std::string_view what, const StridedTensor& output,
                    std::span<const double> expected, const Tolerance& tolerance,
                    std::span<const std::int64_t> rows = {});
// Adds the comparison of all bytes of two tensors on the host, gaps of views included, and a
// sample.
void compare_bytes(CaseOutcome& outcome, std::string_view what, const Tensor& actual,
                   const Tensor& expected);

}  // namespace winnow::testing
