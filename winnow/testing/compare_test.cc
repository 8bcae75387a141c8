// The comparison itself: it must fail on everything that is wrong.
#include "winnow/testing/compare.h"

#include <cmath>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "winnow/testing/expect.h"
#include "winnow/testing/generate.h"

namespace winnow::testing {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr Tolerance kLoose{1e9, RelativeTo::nothing};
constexpr Tolerance kTensor{0.1, RelativeTo::tensor};
constexpr Tolerance kRow{0.1, RelativeTo::row};

Comparison compare_values(std::vector<double> actual, std::vector<double> expected,
                          const Tolerance& tolerance, std::int64_t columns = 2) {
  const std::int64_t shape[] = {std::int64_t(expected.size()) / columns, columns};
  return compare("values", actual, expected, shape, tolerance);
}

TEST(Compare, SpecialsMustStandWhereTheyAreExpected) {
  const double values[] = {kNan, kInf, -kInf, 0.0, 1.0};
  for (const double actual : values) {
    for (const double expected : values) {
      const bool both_finite = std::isfinite(actual) && std::isfinite(expected);
      const bool same = actual == expected || (std::isnan(actual) && std::isnan(expected));
      EXPECT_EQ(compare_values({1, actual}, {1, expected}, kLoose).passed, same || both_finite)
          << actual << " for " << expected;
    }
  }
  const Comparison wrong = compare_values({1, 2, 3, kNan}, {1, 2, 3, 4}, kLoose);
  EXPECT_EQ(wrong.error, kInf);
  EXPECT_EQ(wrong.detail,
            "1 of 4 elements differ in being finite, inf or NaN, first at [1, 1]: got nan, want 4");
}

TEST(Compare, ReadsF64WithAllItsDigits) {
  Tensor tensor(DType::f64, {2});
  fill(tensor, 1 + 1e-12);
  const double ones[] = {1, 1};
  EXPECT_TRUE(compare("x", tensor, ones, {1e-11}).passed);
  const Comparison wrong = compare("x", tensor, ones, {1e-13});
  EXPECT_FALSE(wrong.passed);
  EXPECT_EQ(wrong.detail, "worst at [0]: got 1.0000000000010001, want 1");
}

TEST(Compare, NanNeverPasses) {
  for (const RelativeTo relative_to : {RelativeTo::nothing, RelativeTo::tensor, RelativeTo::row}) {
    EXPECT_FALSE(compare_values({kNan, kNan}, {0, 0}, {kInf, relative_to, 2}).passed);
    EXPECT_FALSE(compare_values({0, 0}, {kNan, kNan}, {kInf, relative_to, 2}).passed);
  }
  // Nor a tolerance that is NaN, which compares as false with everything.
  EXPECT_FALSE(compare_values({1, 2}, {1, 3}, {kNan, RelativeTo::nothing}).passed);
  EXPECT_FALSE(compare_values({1, 2}, {1, 3}, {1e9, RelativeTo::nothing, kNan}).passed);
}

TEST(Compare, ErrorsAreRelativeToTheLargestOfTheTensor) {
  EXPECT_TRUE(compare_values({100, 0}, {100, 9}, kTensor).passed);
  EXPECT_FALSE(compare_values({100, 0}, {100, 11}, kTensor).passed);
  EXPECT_DOUBLE_EQ(compare_values({100, 0}, {100, 9}, kTensor).error, 0.09);
  // The largest is that of the expected values: a wrong giant does not excuse itself.
  EXPECT_FALSE(compare_values({1e6, 1}, {1, 1}, kTensor).passed);
}

TEST(Compare, ErrorsAreRelativeToTheLargestOfTheRow) {
  EXPECT_TRUE(compare_values({100, 9, 1, 1}, {100, 0, 1, 1}, kRow).passed);
  EXPECT_FALSE(compare_values({100, 0, 1, 0.8}, {100, 0, 1, 1}, kRow).passed);
  EXPECT_TRUE(compare_values({100, 0, 1, 0.8}, {100, 0, 1, 1}, kTensor).passed);
}

TEST(Compare, ZerosAreExactWhereThereIsNoMagnitude) {
  EXPECT_TRUE(compare_values({0, -0.0}, {0, 0}, kTensor).passed);
  EXPECT_FALSE(compare_values({0, 1e-300}, {0, 0}, kTensor).passed);
  EXPECT_FALSE(compare_values({5, 5, 0, 1e-300}, {5, 5, 0, 0}, kRow).passed);
}

TEST(Compare, AbsoluteErrors) {
  const Tolerance tolerance{0.5, RelativeTo::nothing};
  EXPECT_TRUE(compare_values({1000.5, 0}, {1000, 0}, tolerance).passed);
  EXPECT_FALSE(compare_values({1000.6, 0}, {1000, 0}, tolerance).passed);
}

TEST(Compare, CosineDistanceOfTheWholeTensor) {
  std::vector<double> expected(100, 0.01), actual(100, -0.01);
  expected[0] = actual[0] = 1;
  const Tolerance elements_only{0.1, RelativeTo::tensor};
  const Tolerance both{0.1, RelativeTo::tensor, 1e-3};
  EXPECT_TRUE(compare_values(actual, expected, elements_only).passed);
  const Comparison result = compare_values(actual, expected, both);
  EXPECT_FALSE(result.passed);
  EXPECT_LE(result.error, both.error);
  EXPECT_NE(result.detail.find("cosine distance"), std::string::npos) << result.detail;
  EXPECT_TRUE(compare_values(expected, expected, both).passed);
  EXPECT_FALSE(compare_values({0, 0}, {0.1, 0}, {1, RelativeTo::nothing, 0.5}).passed);
  EXPECT_TRUE(compare_values({0, 0}, {0, 0}, {1, RelativeTo::nothing, 0.5}).passed);
  // Specials in the right places are left out of it.
  EXPECT_TRUE(compare_values({kInf, kNan, 1, 2}, {kInf, kNan, 1, 2}, both).passed);
}

TEST(Compare, SizesMustAgree) {
  EXPECT_FALSE(compare_values({1, 2, 3}, {1, 2}, kLoose).passed);
  EXPECT_FALSE(compare_values({}, {1, 2}, kLoose).passed);
  EXPECT_TRUE(compare_values({}, {}, kLoose).passed);
}

TEST(Compare, ReadsStridedTensorsOfEveryFloat) {
  const double expected[] = {1, -2, 0.5, 4, 1.5, -6};
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::f8_e4m3}) {
    Tensor storage(dtype, {2, 2, 4});
    fill_unwritten(storage);
    // [2, 3] with the rows in reverse order and gaps between.
    const TensorView middle = storage.view().slice(1, 1, 2).slice(2, 1, 4);
    char* last = static_cast<char*>(middle.slice(0, 1, 2).data());
    const TensorView view(last, dtype, {2, 3}, {-8, 1});
    for (int i = 0; i < 2; ++i) {
      for (int c = 0; c < 3; ++c) {
        fill(view.slice(0, i, i + 1).slice(1, c, c + 1), expected[3 * i + c]);
      }
    }
    expect_passed(compare("strided", view, expected, {0, RelativeTo::nothing}));
    const std::int64_t second[] = {1};
    expect_passed(
        compare("second", view, std::span(expected).subspan(3), {0, RelativeTo::nothing}, second));
    EXPECT_FALSE(compare("first", view, std::span(expected).first(3), kLoose).passed);
    EXPECT_EQ(count_unwritten(storage.view()), 16 - 6);
    EXPECT_EQ(count_unwritten(view), 0);
    // By columns.
    const double transposed[] = {1, 4, -2, 1.5, 0.5, -6};
    expect_passed(
        compare("transposed", view.transpose(0, 1), transposed, {0, RelativeTo::nothing}));
  }
}

TEST(Compare, NamesTheWorstElement) {
  Tensor tensor(DType::f32, {2, 3});
  tensor.view().at<float>(1, 2) = 3;
  tensor.view().at<float>(0, 1) = 1;
  const std::vector<double> expected(6, 0.0);
  const Comparison result = compare("tensor", tensor, expected, {1, RelativeTo::nothing});
  EXPECT_FALSE(result.passed);
  EXPECT_EQ(result.error, 3);
  EXPECT_EQ(result.detail, "worst at [1, 2]: got 3, want 0");
}

TEST(Compare, OutcomeOfACaseWithoutComparisonsIsNotAPass) {
  CaseOutcome outcome;
  EXPECT_FALSE(outcome.passed());
  outcome.comparisons.push_back({"a", 0, 0, true, ""});
  EXPECT_TRUE(outcome.passed());
  outcome.comparisons.push_back({"b", 0, 0, false, ""});
  EXPECT_FALSE(outcome.passed());
}

// The first numbers of two seeds, as computed elsewhere: cases must be the same everywhere.
TEST(Generate, NumbersAreTheSameOnEveryPlatform) {
  Random random(1234567);
  EXPECT_EQ(random.next(), 6457827717110365317u);
  EXPECT_EQ(random.next(), 3203168211198807973u);
  EXPECT_EQ(random.next(), 9817491932198370423u);
  EXPECT_EQ(seed_from(""), 0xcbf29ce484222325u);
  EXPECT_EQ(seed_from("a"), 0xaf63dc4c8601ec8cu);
}

TEST(Generate, NormalNumbersHaveMeanZeroAndVarianceOne) {
  Random random(7);
  double sum = 0, squares = 0;
  constexpr int kCount = 100000;
  for (int n = 0; n < kCount; ++n) {
    const double value = random.normal();
    sum += value;
    squares += value * value;
  }
  constexpr double kFourSigma = 4 / 316.0;  // of the mean of so many
  EXPECT_LT(std::abs(sum / kCount), kFourSigma);
  EXPECT_LT(std::abs(squares / kCount - 1), 2 * kFourSigma);
}

TEST(Generate, DistinctRowsAreDistinctAndInRange) {
  Tensor indices(DType::i32, {20, 1, 50});
  Random random(3);
  fill_distinct(indices, random, 64);
  for (std::int64_t i = 0; i < 20; ++i) {
    std::vector<bool> seen(64, false);
    for (std::int64_t j = 0; j < 50; ++j) {
      const std::int32_t index = indices.view().at<std::int32_t>(i, 0, j);
      ASSERT_GE(index, 0);
      ASSERT_LT(index, 64);
      EXPECT_FALSE(seen[index]);
      seen[index] = true;
    }
  }
  EXPECT_THROW(fill_distinct(indices, random, 49), Error);
}

}  // namespace
}  // namespace winnow::testing
