// indexer::quantize: the case table, rows worked by hand, what it refuses, and scores of its rows.
#include "winnow/indexer/quantize/quantize.h"

#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "winnow/indexer/cases.h"
#include "winnow/indexer/scores/scores.h"
#include "winnow/testing/expect.h"

namespace winnow::indexer {
namespace {

using winnow::testing::expect_error;
using winnow::testing::expect_refused;

WINNOW_CASE_TABLE(QuantizeCases, "indexer::quantize");

struct Problem {
  Tensor x{DType::f32, {3, 64}}, rows{DType::f8_e4m3, {3, 64}}, scale{DType::f32, {3}};
  Tensor pages{DType::u8, {2, 64 * 68}}, slots{DType::i64, {3}};
  Problem() {
    for (std::int64_t i = 0; i < 3; ++i) slots.values<std::int64_t>()[i] = i;
    for (Tensor* output : {&rows, &scale, &pages}) winnow::testing::fill_unwritten(*output);
  }
  QuantizeArgs plain() { return {.x = x, .rows = rows, .scale = scale}; }
  QuantizeArgs paged() { return {.x = x, .pages = pages, .slots = slots}; }
  void expect_untouched(const std::string& text) {
    for (Tensor* output : {&rows, &scale, &pages}) {
      EXPECT_EQ(winnow::testing::count_unwritten(output->view()), output->numel()) << text;
    }
  }
};

// 448 -> 0x7e, 1 -> 0x38, 17 is a tie between 16 (even) and 18; 19 between 18 and 20 (even).
TEST(Quantize, ByHand) {
  Problem problem;
  const float row[] = {448, 1, 17, 19, -0.0f, -2};
  for (int c = 0; c < 6; ++c) problem.x.view().at<float>(0, c) = row[c];
  problem.x.view().at<float>(1, 63) = 500;
  problem.x.view().at<float>(2, 0) = 1e-5f;
  EXPECT_EQ(to_string(quantize(problem.plain())), "cpu");
  const std::uint8_t bits[] = {0x7e, 0x38, 0x58, 0x5a, 0x80, 0xc0, 0x00};
  for (int c = 0; c < 7; ++c) {
    EXPECT_EQ(problem.rows.view().at<Float8E4M3>(0, c).bits, bits[c]) << c;
  }
  const auto scale = [&](int i) { return problem.scale.values<float>()[i]; };
  EXPECT_EQ(scale(0), 1.0f);
  EXPECT_EQ(scale(1), 500.0f / 448.0f);
  EXPECT_EQ(problem.rows.view().at<Float8E4M3>(1, 63).bits, 0x7e);
  EXPECT_EQ(scale(2), 1e-4f / 448.0f);
  QuantizeArgs args = problem.plain();
  args.power_of_two = true;
  quantize(args);
  EXPECT_EQ(scale(0), 1.0f);
  EXPECT_EQ(scale(1), 2.0f);
  EXPECT_EQ(scale(2), std::ldexp(1.0f, -22));  // 1e-4 / 448 is 2.2e-7
}

TEST(Quantize, APageHoldsElementsAndThenScales) {
  Problem problem;
  problem.x.view().at<float>(1, 5) = 896;
  std::int64_t* slots = problem.slots.values<std::int64_t>().data();
  slots[0] = -1;
  slots[1] = 64 + 7;
  slots[2] = 0;
  quantize(problem.paged());
  const auto page = problem.pages.view();
  EXPECT_EQ(page.at<std::uint8_t>(1, 7 * 64 + 5), 0x7e);
  const std::uint8_t two[] = {0, 0, 0, 0x40};  // 2.0f
  for (int byte = 0; byte < 4; ++byte) {
    EXPECT_EQ(page.at<std::uint8_t>(1, 64 * 64 + 7 * 4 + byte), two[byte]);
  }
  EXPECT_EQ(winnow::testing::count_unwritten(page), page.numel() - 2 * 68);
}

TEST(Quantize, ANanOrAnInfinityMakesTheRowNan) {
  Problem problem;
  problem.x.view().at<float>(0, 0) = std::nanf("");
  problem.x.view().at<float>(2, 63) = -std::numeric_limits<float>::infinity();
  quantize(problem.plain());
  for (const int i : {0, 2}) {
    EXPECT_TRUE(std::isnan(problem.scale.values<float>()[i]));
    for (int c = 0; c < 64; ++c) {
      EXPECT_EQ(problem.rows.view().at<Float8E4M3>(i, c).bits, 0x7f);
    }
  }
  EXPECT_EQ(problem.scale.values<float>()[1], 1e-4f / 448.0f);
}

// Queries, keys and scales go from here into scores(): near those of the numbers themselves, and a
// row that is not finite has the score NaN.
TEST(Quantize, FeedsScores) {
  constexpr std::int64_t s_q = 3, h = 2, s_k = 70, d = 128;
  Tensor q(DType::f32, {s_q, h, d}), k(DType::f32, {s_k, d}), weights(DType::f32, {s_q, h});
  winnow::testing::Random random(7);
  for (Tensor* tensor : {&q, &k, &weights}) winnow::testing::fill_uniform(*tensor, random, 0.1, 1);
  k.view().at<float>(11, 3) = std::nanf("");
  Tensor q8(DType::f8_e4m3, {s_q, h, d}), k8(DType::f8_e4m3, {s_k, d});
  Tensor q_scale(DType::f32, {s_q, h}), k_scale(DType::f32, {s_k});
  quantize({.x = q, .rows = q8, .scale = q_scale});
  quantize({.x = k, .rows = k8, .scale = k_scale});
  Tensor want(DType::f32, {s_q, s_k}), got(DType::f32, {s_q, s_k});
  scores({.q = q, .k = k, .weights = weights, .scores = want});
  for (std::int64_t n = 0; n < s_q * h; ++n) {
    weights.values<float>()[n] *= q_scale.values<float>()[n];
  }
  scores({.q = q8, .k = k8, .weights = weights, .k_scale = k_scale, .scores = got});
  constexpr float kRounding = 2.0f / 16;  // of a product of two rounded numbers
  for (std::int64_t n = 0; n < s_q * s_k; ++n) {
    const float wanted = want.values<float>()[n];
    if (n % s_k == 11) {
      EXPECT_TRUE(std::isnan(got.values<float>()[n]));
    } else {
      EXPECT_NEAR(got.values<float>()[n], wanted, kRounding * wanted) << n;
    }
  }
}

TEST(Quantize, Refuses) {
  Tensor x32(DType::f32, {3, 32}), ints(DType::i32, {3, 64}), vector(DType::f32, {64});
  Tensor heads(DType::f32, {3, 1, 64}), scale2(DType::f32, {2}), half(DType::f16, {3, 64});
  Tensor page(DType::u8, {2, 64 * 64}), floats(DType::f32, {3});
  const auto reject = [](bool paged, const auto& bend, const std::string& text) {
    Problem problem;
    QuantizeArgs args = paged ? problem.paged() : problem.plain();
    bend(args);
    expect_refused(quantize, args, "indexer::quantize: " + text,
                   {problem.rows, problem.scale, problem.pages});
  };
  Problem other;
  using Args = QuantizeArgs;
  reject(false, [](Args& a) { a.x = {}; }, "x: want a tensor [n, d] or [n, h, d], got none");
  reject(
      false, [&](Args& a) { a.x = vector; },
      "x: want a tensor [n, d] or [n, h, d], got 1 dimensions");
  reject(false, [&](Args& a) { a.x = x32; }, "x: want d = 128 or 64, got d = 32");
  reject(false, [&](Args& a) { a.x = ints; }, "x: want dtype f32 or f16 or bf16, got i32");
  reject(false, [&](Args& a) { a.rows = half; }, "rows: want dtype f8_e4m3 or u8, got f16");
  reject(false, [](Args& a) { a.rows = {}; }, "rows: want a tensor of shape [n=3, d=64], got none");
  reject(false, [&](Args& a) { a.scale = scale2; }, "scale: want shape [n=3], got [2]");
  reject(
      false, [&](Args& a) { a.slots = other.slots; },
      "slots: want none, where pages are absent, got a tensor");
  reject(
      true, [](Args& a) { a.slots = {}; }, "slots: want a tensor [n], which pages need, got none");
  reject(
      true, [&](Args& a) { a.rows = other.rows; },
      "rows: want no rows and no scale beside pages, got them too");
  reject(
      true, [&](Args& a) { a.x = heads; },
      "x: want 2 dimensions [n, d], for pages, got shape [3, 1, 64]");
  reject(
      true, [&](Args& a) { a.pages = page; },
      "pages: want shape [num_pages=2, 64 * (d + 4)=4352], got [2, 4096]");
  reject(true, [&](Args& a) { a.slots = floats; }, "slots: want dtype i64 or i32, got f32");
}

TEST(Quantize, RefusesSlotsAndOverlap) {
  Problem problem;
  const auto reject = [&](const QuantizeArgs& args, const std::string& text) {
    expect_error([&] { quantize(args); }, ErrorCode::invalid_argument,
                 "indexer::quantize: " + text);
    problem.expect_untouched(text);
  };
  std::int64_t* slots = problem.slots.values<std::int64_t>().data();
  slots[1] = 128;
  reject(problem.paged(), "slots: want slots below 2 pages * 64 slots, got slot 128 for row 1");
  slots[1] = 2;
  reject(problem.paged(), "slots: want each slot at most once, got slot 2 for row 1 and row 2");
  QuantizeArgs args = problem.plain();
  args.scale = TensorView(problem.rows.data(), DType::f32, {3});
  reject(args, "scale: want memory apart from rows, got memory that both use");
}

}  // namespace
}  // namespace winnow::indexer
