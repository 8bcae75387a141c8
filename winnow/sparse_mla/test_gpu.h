// What the GPU tests of the family share. Only for tests: needs GoogleTest.
#pragma once

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "winnow/core/backend.h"
#include "winnow/sparse_mla/cases.h"
#include "winnow/testing/compare.h"
#include "winnow/testing/expect.h"

namespace winnow::sparse_mla {

inline constexpr Device kGpu{DeviceType::cuda, 0};

// Skips without a GPU that the sm90 backend serves, and says why.
class GpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const BackendStatus& sm90 = backends().front();
    ASSERT_EQ(sm90.backend, Backend::sm90);
    if (!sm90.supported) GTEST_SKIP() << sm90.reason;
  }
};

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
