// The check of a product of mma.sync, on a GPU and in the simulator.
#pragma once

#include <numeric>
#include <string>
#include <vector>

#include "tools/winnow/mma_product.h"
#include <gtest/gtest.h>

#include "winnow/core/device_memory.h"
#include "winnow/testing/compare.h"
#include "winnow/testing/generate.h"
#include "winnow/testing/operation.h"

namespace winnow::cli {

struct ProductSize {
  std::int64_t m, n, k;
};

// Compares every `each`-th row of a product, twice: the second one begins with the memory for
// shared sums as the first has left it.
inline testing::CaseOutcome compare_product(MmaProduct::Plan plan, const ProductSize& size,
                                            std::int64_t each = 1) {
  constexpr Device kGpu{DeviceType::cuda, 0};
  // Half a unit in the last place of bf16, and little for the order of the sums.
  constexpr testing::Tolerance kTolerance{.error = 0.004};
  Tensor a(DType::bf16, {size.m, size.k}), b(DType::bf16, {size.n, size.k});
  testing::Random random(1);
  testing::fill_normal_rows(a, random);
  testing::fill_normal_rows(b, random);
  Tensor c(DType::bf16, {size.m, size.n});
  testing::fill_unwritten(c);
  const Tensor a_there = a.to(kGpu), b_there = b.to(kGpu);
  Tensor c_there = c.to(kGpu);

  std::vector<std::int64_t> rows;
  for (std::int64_t i = 0; i < size.m; i += each) rows.push_back(i);
  const std::vector<double> a_rows = testing::read_rows(a, rows), b_rows = testing::read(b);
  std::vector<double> expected;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto row = a_rows.begin() + std::int64_t(i) * size.k;
    for (std::int64_t j = 0; j < size.n; ++j) {
      expected.push_back(std::inner_product(row, row + size.k, b_rows.begin() + j * size.k, 0.0));
    }
  }
  MmaProduct product(a_there, b_there, c_there, plan);
  testing::CaseOutcome outcome{.backend = Backend::cuda, .comparisons = {}};
  for (int i = 0; i < 2; ++i) {
    copy_between(c_there.data(), kGpu, c.data(), {}, static_cast<std::size_t>(c.numel()) * 2);
    product.queue();
    const Tensor here = c_there.to({});
    outcome.comparisons.push_back(testing::compare("c", here, expected, kTolerance, rows));
    if (const std::int64_t unwritten = testing::count_unwritten(here); unwritten != 0) {
      outcome.comparisons.push_back(
          {"c", 1, 0, false, std::to_string(unwritten) + " elements are not written"});
    }
  }
  return outcome;
}

inline void expect_product(MmaProduct::Plan plan, const ProductSize& size, std::int64_t each = 1) {
  for (const testing::Comparison& compared : compare_product(plan, size, each).comparisons) {
    EXPECT_TRUE(compared.passed) << compared.error << " " << compared.detail;
  }
}

}  // namespace winnow::cli
