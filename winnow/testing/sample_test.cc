// Samples of outputs and their comparison, which must fail on every kind of difference.
#include "winnow/testing/sample.h"

#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "winnow/core/error.h"
#include "winnow/testing/compare.h"
#include "winnow/testing/strided.h"

namespace winnow::testing {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

Sample values(std::vector<double> list, double tolerance = 0.5) {
  const auto size = static_cast<std::int64_t>(list.size());
  std::vector<double> tolerances(list.size(), tolerance);
  return {"x", DType::f32, {size}, std::move(list), std::move(tolerances)};
}

TEST(Sample, TakesElementsInRowMajorOrderWhateverTheStrides) {
  for (const Layout layout : {Layout::dense, Layout::wide, Layout::reversed}) {
    const StridedTensor tensor = make_output(DType::f32, {40, 8, 64}, layout);
    std::vector<double> tolerances;
    for (std::int64_t i = 0; i < 40 * 8 * 64; ++i) {
      tensor.view.at<float>(i / 512, i / 64 % 8, i % 64) = static_cast<float>(i);
      tolerances.push_back(double(i) / 2);
    }
    const Sample taken = sample("x", tensor.view, tolerances);
    EXPECT_EQ(taken.shape, (std::vector<std::int64_t>{40, 8, 64}));
    ASSERT_EQ(taken.values.size(), 976u);  // every 21st
    EXPECT_EQ(sample_step(40 * 8 * 64), 21);
    EXPECT_EQ(sample_count(40 * 8 * 64), 976);
    for (std::size_t i = 0; i < taken.values.size(); ++i) {
      EXPECT_EQ(taken.values[i], double(21 * i));
      EXPECT_EQ(taken.tolerances[i], double(21 * i) / 2);
    }
  }
}

TEST(Sample, HasAllElementsOfASmallOutput) {
  for (const std::int64_t numel : {0, 1, 2, 1023, 1024}) {
    EXPECT_EQ(sample_step(numel), 1);
    EXPECT_EQ(sample_count(numel), numel);
  }
  EXPECT_EQ(sample_step(1025), 3);
  EXPECT_LE(sample_count(1 << 30), kMostSampled);
  const Tensor one(DType::i32, {1});
  EXPECT_THROW(sample("x", one, {}), Error);
}

TEST(Sample, ComparesWithinTheTolerances) {
  EXPECT_TRUE(compare(values({1, 2}), values({1.5, 1.5}, 0)).passed);
  EXPECT_EQ(compare(values({1, 2}), values({1.25, 2}, 0)).error, 0.5);
  const Comparison wrong = compare(values({1, 2, 3}), values({1, 2.75, 4}));
  EXPECT_FALSE(wrong.passed);
  EXPECT_EQ(wrong.detail,
            "2 differ, first at sample 1: got 2.000000, recorded 2.750000, tolerance 0.500000");
  EXPECT_FALSE(compare(values({1}, 0), values({1 + 1e-12})).passed);
  EXPECT_TRUE(compare(values({}), values({})).passed);
}

TEST(Sample, SpecialValuesMustBeEqual) {
  const double all[] = {kNan, kInf, -kInf, 1.0};
  for (const double actual : all) {
    for (const double recorded : all) {
      const bool same = actual == recorded || (actual != actual && recorded != recorded);
      EXPECT_EQ(compare(values({actual}, kInf), values({recorded})).passed, same)
          << actual << " for " << recorded;
    }
  }
}

TEST(Sample, OtherNamesDtypesAndShapesAreDifferences) {
  Sample other = values({1});
  other.what = std::string("y");
  EXPECT_FALSE(compare(values({1}), other).passed);
  other = values({1});
  other.dtype = DType::bf16;
  EXPECT_FALSE(compare(values({1}), other).passed);
  other = values({1});
  other.shape = {1, 1};
  EXPECT_FALSE(compare(values({1}), other).passed);
  EXPECT_FALSE(compare(values({1}), values({1, 2})).passed);
}

}  // namespace
}  // namespace winnow::testing
