// sparse_mla::distribution: the case table against the oracle, a problem worked by hand, and how
// special values travel.
#include "winnow/sparse_mla/distribution/distribution.h"

#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include <gtest/gtest.h>

#include "winnow/sparse_mla/cases.h"
#include "winnow/sparse_mla/test_problem.h"
#include "winnow/testing/expect.h"

namespace winnow::sparse_mla {
namespace {

using winnow::testing::expect_all;
using winnow::testing::expect_passed;

WINNOW_CASE_TABLE(DistributionCase, "sparse_mla::distribution");

// The weights of the rows are 1, 2 and 5 for head 0 and 1, 1 and 1 for head 1, whose q is 0.
TEST(Distribution, TwoHeadsByHand) {
  Tensor q(DType::f32, {1, 2, 512}), kv(DType::f32, {3, 1, 512});
  Tensor indices(DType::i32, {1, 1, 5}), lse(DType::f32, {1, 2}), attn_sum(DType::f32, {1, 5});
  q.view().at<float>(0, 0, 0) = 1;
  const float weights[] = {1, 2, 5};
  for (int t = 0; t < 3; ++t) kv.view().at<float>(t, 0, 0) = std::log(weights[t]);
  const std::int32_t rows[] = {2, -1, 0, 3, 1};  // 3 is beyond the last row
  std::copy(std::begin(rows), std::end(rows), indices.values<std::int32_t>().begin());
  lse.view().at<float>(0, 0) = std::log(8.0f);
  lse.view().at<float>(0, 1) = std::log(3.0f);
  distribution(
      {.q = q, .kv = kv, .indices = indices, .lse = lse, .scale = 1.0, .attn_sum = attn_sum});
  const double third = 1 / 3.0;
  const double expected[] = {5 / 8.0 + third, 0, 1 / 8.0 + third, 0, 2 / 8.0 + third};
  expect_passed(testing::compare("attn_sum", attn_sum, expected,
                                 tolerance(Quantity::attn_sum, CaseShape{}, 2)));

  // lse is used as passed: one unit more makes everything smaller by e.
  for (float& value : lse.values<float>()) value += 1;
  distribution(
      {.q = q, .kv = kv, .indices = indices, .lse = lse, .scale = 1.0, .attn_sum = attn_sum});
  std::vector<double> smaller;
  for (const double value : expected) smaller.push_back(value / std::exp(1.0));
  expect_passed(testing::compare("attn_sum", attn_sum, smaller,
                                 tolerance(Quantity::attn_sum, CaseShape{}, 2)));
}

// Over all rows of a range it is what lists of these rows give, each at the place of its row; and a
// list of two dimensions is one of three.
TEST(Distribution, DenseIsAListOfAllVisibleRows) {
  const CaseShape shape{.name = "lists", .s_kv = 90, .topk = 90, .ranges = Ranges::ragged};
  const CaseInputs inputs = make_inputs(shape);
  Tensor indices(DType::i32, {shape.s_q, shape.s_kv});
  for (std::int64_t i = 0; i < shape.s_q; ++i) {
    for (std::int32_t t = 0; t < shape.s_kv; ++t) {
      const bool seen = t >= inputs.key_start.view.at<std::int32_t>(i) &&
                        t < inputs.key_end.view.at<std::int32_t>(i);
      indices.view().at<std::int32_t>(i, t) = seen ? t : -1;
    }
  }
  const auto results = [&](bool dense) {
    Tensor out(shape.dtype, {shape.s_q, shape.h_q, kValueDim});
    Tensor lse(DType::f32, {shape.s_q, shape.h_q}), attn_sum(DType::f32, {shape.s_q, shape.s_kv});
    ForwardArgs forward_args{.out = out, .lse = lse};
    DistributionArgs args{.lse = lse, .attn_sum = attn_sum};
    inputs.pass_to(forward_args);
    inputs.pass_to(args);
    if (!dense) {
      forward_args.indices = args.indices = indices;
      forward_args.key_start = forward_args.key_end = args.key_start = args.key_end = {};
    }
    forward(forward_args);
    distribution(args);
    return std::array{std::move(out), std::move(lse), std::move(attn_sum)};
  };
  const auto dense = results(true), listed = results(false);
  for (std::size_t n = 0; n < dense.size(); ++n) {
    EXPECT_TRUE(winnow::testing::same_bytes(dense[n], listed[n])) << n;
  }
}

TEST(Distribution, NanReachesOnlyWhatUsesIt) {
  const auto run = [](auto spoil) {
    TestProblem problem;
    const std::int32_t rows[] = {0, 1, 0, 1, 2, 3, 3, 2};
    std::copy(std::begin(rows), std::end(rows), problem.indices.values<std::int32_t>().begin());
    spoil(problem);
    distribution(DistributionOp::args(problem));
    return winnow::testing::read(problem.attn_sum.view());
  };
  const std::vector<double> clean = run([](TestProblem&) {});
  const auto expect = [&](const std::vector<double>& actual, std::vector<int> spoilt) {
    std::vector<double> expected = clean;
    for (const int n : spoilt) expected[n] = std::nan("");
    const std::int64_t shape[] = {2, 4};
    expect_passed(
        testing::compare("NaN", actual, expected, shape, {0, testing::RelativeTo::nothing}));
  };
  expect(run([](TestProblem& p) { p.kv.view().at<float>(3, 0, 9) = std::nanf(""); }), {5, 6});
  expect(run([](TestProblem& p) { p.q.view().at<float>(0, 1, 9) = std::nanf(""); }), {0, 1, 2, 3});
  expect(run([](TestProblem& p) { p.lse.view().at<float>(1, 2) = std::nanf(""); }), {4, 5, 6, 7});
  expect(run([](TestProblem& p) { p.kv.view().at<float>(4, 0, 9) = std::nanf(""); }), {});
}

// As forward leaves it: lse is -inf where nothing is visible. And with any other lse.
TEST(Distribution, NothingVisibleIsZero) {
  for (const float lse : {-std::numeric_limits<float>::infinity(), 0.0f, std::nanf("")}) {
    TestProblem problem;
    winnow::testing::fill(problem.lse, lse);
    winnow::testing::fill(problem.kv, std::nan(""));
    for (std::int32_t& index : problem.indices.values<std::int32_t>()) index = -1;
    winnow::testing::fill_unwritten(problem.attn_sum);
    distribution(DistributionOp::args(problem));
    expect_all(problem.attn_sum, 0);
  }
}

}  // namespace
}  // namespace winnow::sparse_mla
