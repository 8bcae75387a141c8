// sparse_mla::forward: the case table against the oracle, problems worked by hand, and how special
// values travel.
#include "winnow/sparse_mla/forward/forward.h"

#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "winnow/sparse_mla/cases.h"
#include "winnow/sparse_mla/test_problem.h"
#include "winnow/testing/expect.h"

namespace winnow::sparse_mla {
namespace {

using winnow::testing::expect_all;
using winnow::testing::expect_passed;
using winnow::testing::same_bytes;

constexpr float kInf = std::numeric_limits<float>::infinity();

WINNOW_CASE_TABLE(ForwardCase, "sparse_mla::forward");

// Three rows with the weights 1, 2 and 5: column 0 of a row is the logarithm of its weight, column
// 1 is 10, 20 or 30. With q = (1, 0, 0, ...) and scale 1 the logits are those logarithms.
struct ByHand {
  Tensor q{DType::f32, {1, 1, 512}}, kv{DType::f32, {3, 1, 512}};
  Tensor indices{DType::i32, {1, 1, 3}}, sink{DType::f32, {1}};
  Tensor out{DType::f32, {1, 1, 512}}, max_logits{DType::f32, {1, 1}}, lse{DType::f32, {1, 1}};

  ByHand() {
    q.view().at<float>(0, 0, 0) = 1;
    const float weights[] = {1, 2, 5};
    for (int t = 0; t < 3; ++t) {
      kv.view().at<float>(t, 0, 0) = std::log(weights[t]);
      kv.view().at<float>(t, 0, 1) = 10.0f * float(t + 1);
      indices.view().at<std::int32_t>(0, 0, t) = t;
    }
  }
  ForwardArgs args() {
    return {.q = q,
            .kv = kv,
            .indices = indices,
            .scale = 1.0,
            .out = out,
            .max_logits = max_logits,
            .lse = lse};
  }
  void expect(double value, double largest, double logsum) {
    const double largest_logit = std::max(std::abs(largest), 2.0);
    const CaseShape shape;
    const auto check = [&](const char* what, float actual, double wanted, Quantity quantity) {
      const double actuals[] = {actual}, expected[] = {wanted};
      const std::int64_t one[] = {1};
      expect_passed(testing::compare(what, actuals, expected, one,
                                     tolerance(quantity, shape, largest_logit)));
    };
    check("out", out.view().at<float>(0, 0, 1), value, Quantity::out);
    check("max_logits", max_logits.view().at<float>(0, 0), largest, Quantity::max_logits);
    check("lse", lse.view().at<float>(0, 0), logsum, Quantity::lse);
  }
};

TEST(Forward, ThreeRowsByHand) {
  ByHand problem;
  forward(problem.args());
  problem.expect((10 + 2 * 20 + 5 * 30) / 8.0, std::log(5), std::log(8));
}

TEST(Forward, DuplicatesCountEachByHand) {
  ByHand problem;
  problem.indices.view().at<std::int32_t>(0, 0, 2) = 0;  // weights 1, 2, 1
  forward(problem.args());
  problem.expect((10 + 2 * 20 + 10) / 4.0, std::log(2), std::log(4));
}

TEST(Forward, SinkTakesItsShareByHand) {
  ByHand problem;
  problem.sink.view().at<float>(0) = std::log(8.0f);  // as much as the three rows together
  ForwardArgs args = problem.args();
  args.attn_sink = problem.sink;
  forward(args);
  problem.expect((10 + 2 * 20 + 5 * 30) / 16.0, std::log(5), std::log(8));
}

// Row t stands for the tokens 4 t to 4 t + 3: before token 3 nothing is visible, and the division
// must not round -1 / 4 to row 0.
TEST(Forward, CausalLimitByHand) {
  for (const std::int64_t position : {-5, -4, -1, 0, 2, 3, 6, 7, 10, 11, 1000}) {
    ByHand problem;
    ForwardArgs args = problem.args();
    args.q_start = position;
    args.k_stride = 4;
    forward(args);
    if (position < 3) {
      expect_all(problem.out, 0);
      expect_all(problem.lse, -kInf);
      expect_all(problem.max_logits, -kInf);
    } else if (position < 7) {
      problem.expect(10, 0, 0);
    } else if (position < 11) {
      problem.expect((10 + 2 * 20) / 3.0, std::log(2), std::log(3));
    } else {
      problem.expect((10 + 2 * 20 + 5 * 30) / 8.0, std::log(5), std::log(8));
    }
  }
}

TEST(Forward, ExtremePositionsAndStrides) {
  ByHand problem;
  ForwardArgs args = problem.args();
  args.q_start = std::int64_t{1} << 61;
  forward(args);
  problem.expect((10 + 2 * 20 + 5 * 30) / 8.0, std::log(5), std::log(8));
  args.k_stride = std::numeric_limits<std::int64_t>::max();
  forward(args);
  expect_all(problem.out, 0);
  args.q_start = -(std::int64_t{1} << 61);
  args.k_stride = 1;
  forward(args);
  expect_all(problem.out, 0);
  expect_all(problem.lse, -kInf);
}

TEST(Forward, OptionalOutputsMayBeLeftOut) {
  TestProblem all, some;
  forward(ForwardOp::args(all));
  ForwardArgs args = ForwardOp::args(some);
  args.lse = {};
  args.max_logits = {};
  forward(args);
  EXPECT_TRUE(same_bytes(all.out, some.out));
}

// Query 0 uses rows 0 and 1, query 1 rows 2 and 3.
TestProblem disjoint_queries() {
  TestProblem problem;
  const std::int32_t rows[] = {0, 1, 0, 1, 2, 3, 3, 2};
  std::copy(std::begin(rows), std::end(rows), problem.indices.values<std::int32_t>().begin());
  return problem;
}

// The elements of query (and head, if one is named) are NaN, all others as in `clean`.
void expect_nan_only_at(const Tensor& actual, const Tensor& clean, std::int64_t query,
                        std::int64_t head = -1) {
  std::vector<double> expected = winnow::testing::read(clean.view());
  const std::int64_t per_head = actual.numel() / 6;
  for (std::int64_t n = 0; n < actual.numel(); ++n) {
    const std::int64_t i = n / (3 * per_head), h = n / per_head % 3;
    if (i == query && (head < 0 || h == head)) expected[n] = std::nan("");
  }
  expect_passed(testing::compare("NaN", actual, expected, {0, testing::RelativeTo::nothing}));
}

TEST(Forward, NanInAUsedRowReachesTheQueriesThatUseIt) {
  TestProblem clean = disjoint_queries();
  forward(ForwardOp::args(clean));
  for (const std::int64_t column : {0, 300, 511}) {
    TestProblem spoilt = disjoint_queries();
    spoilt.kv.view().at<float>(1, 0, column) = std::nanf("");
    forward(ForwardOp::args(spoilt));
    expect_nan_only_at(spoilt.out, clean.out, 0);
    expect_nan_only_at(spoilt.lse, clean.lse, 0);
  }
}

TEST(Forward, NanInAQueryOrSinkReachesItsHeadOnly) {
  TestProblem clean = disjoint_queries(), in_q = disjoint_queries(), in_sink = disjoint_queries();
  forward(ForwardOp::args(clean));
  in_q.q.view().at<float>(1, 2, 77) = std::nanf("");
  forward(ForwardOp::args(in_q));
  expect_nan_only_at(in_q.out, clean.out, 1, 2);
  expect_nan_only_at(in_q.lse, clean.lse, 1, 2);

  in_sink.attn_sink.view().at<float>(1) = std::nanf("");
  forward(ForwardOp::args(in_sink));
  for (std::int64_t i = 0; i < 2; ++i) {
    EXPECT_TRUE(std::isnan(in_sink.out.view().at<float>(i, 1, 0)));
    EXPECT_EQ(in_sink.out.view().at<float>(i, 0, 0), clean.out.view().at<float>(i, 0, 0));
    EXPECT_EQ(in_sink.out.view().at<float>(i, 2, 0), clean.out.view().at<float>(i, 2, 0));
  }
  EXPECT_TRUE(same_bytes(in_sink.lse, clean.lse));
}

// One row beyond the range of the exponential: still finite, and the weight is all its own.
TEST(Forward, LogitsOfTenThousandDoNotOverflow) {
  ByHand problem;
  problem.q.view().at<float>(0, 0, 0) = 10000;
  forward(problem.args());
  problem.expect(30, 10000 * double(std::log(5.0f)), 10000 * double(std::log(5.0f)));
  problem.q.view().at<float>(0, 0, 0) = -10000;
  forward(problem.args());
  problem.expect(10, 0, 0);
}

// The NaN of what nobody may look at does not come out: hidden rows, entries beyond the length, the
// query and the sink of a query that sees nothing.
TEST(Forward, NothingVisibleIsZeroWhateverTheRestHolds) {
  TestProblem problem;
  for (Tensor* tensor : {&problem.q, &problem.kv, &problem.attn_sink}) {
    winnow::testing::fill(*tensor, std::nan(""));
  }
  for (std::int32_t& length : problem.topk_length.values<std::int32_t>()) length = 0;
  ForwardArgs args = ForwardOp::args(problem);
  args.attn_sink = {};
  forward(args);
  expect_all(problem.out, 0);
  expect_all(problem.lse, -kInf);
  expect_all(problem.max_logits, -kInf);
}

}  // namespace
}  // namespace winnow::sparse_mla
