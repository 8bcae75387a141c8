// What the GPU tests of the family share. Only for tests: needs GoogleTest.
#pragma once

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "winnow/core/backend.h"
#include "winnow/sparse_mla/cases.h"
#include "winnow/testing/compare.h"
#include "winnow/testing/expect.h"
#include "winnow/testing/gpu_test.h"

namespace winnow::sparse_mla {

inline constexpr Device kGpu{DeviceType::cuda, 0};

using GpuTest = testing::GpuTest<Backend::sm90>;

inline CaseShape small_shape(const std::string& name) {
  return {.name = name, .dtype = DType::bf16, .s_q = 300, .h_q = 70, .s_kv = 1000, .topk = 200};
}

// The tensors of the functions below may be on any device.
inline bool same_bytes(const Tensor& a, const Tensor& b) {
  return testing::same_bytes(a.to({}), b.to({}));
}
inline std::vector<double> numbers(const Tensor& tensor) {
  return testing::read(tensor.to({}).view());
}

// `actual` is judged by the tolerance of its quantity.
inline void expect_close(const char* what, const Tensor& actual, const Tensor& expected,
                         Quantity quantity, const CaseShape& shape) {
  constexpr double kLargestLogit = 8;  // of unit-variance logits
  testing::expect_passed(testing::compare(what, actual.to({}).view(), numbers(expected),
                                          tolerance(quantity, shape, kLargestLogit)));
}

}  // namespace winnow::sparse_mla
