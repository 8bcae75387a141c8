// indexer::backward: the case table, a problem worked by hand, special values, what it refuses, and
// what its results do not depend on. (python/tests/test_indexer_torch.py has torch's gradients.)
#include <cmath>
#include <functional>
#include <limits>

#include <gtest/gtest.h>

#include "winnow/indexer/backward/backward.h"
#include "winnow/indexer/cases.h"
#include "winnow/testing/expect.h"

namespace winnow::indexer {
namespace {

using winnow::testing::expect_all;
using winnow::testing::expect_error;
using winnow::testing::expect_refused;

WINNOW_CASE_TABLE(IndexerBackwardCase, "indexer::backward");

// Tensors of one call, zeros: 2 queries, 2 heads, 4 rows, 3 entries.
struct Problem {
  Tensor q{DType::f32, {2, 2, 64}}, k{DType::f32, {4, 64}}, weights{DType::f32, {2, 2}};
  Tensor indices{DType::i32, {2, 3}}, d_scores{DType::f32, {2, 3}};
  Tensor dq{DType::f32, {2, 2, 64}}, dk{DType::f32, {4, 64}}, d_weights{DType::f32, {2, 2}};
  BackwardArgs args() {
    return {.q = q,
            .k = k,
            .weights = weights,
            .indices = indices,
            .d_scores = d_scores,
            .dq = dq,
            .dk = dk,
            .d_weights = d_weights};
  }
  void set_indices(std::initializer_list<std::int32_t> values) {
    std::copy(values.begin(), values.end(), indices.values<std::int32_t>().begin());
  }
  void set_d_scores(std::initializer_list<float> values) {
    std::copy(values.begin(), values.end(), d_scores.values<float>().begin());
  }
};

// Head 0 sees keys 2 and -1 through column 0, head 1 through its negative. Query 0 has row 0 twice
// and row 1, query 1 has row 0 and two entries that are none.
TEST(IndexerBackward, ByHand) {
  Problem p;
  p.k.view().at<float>(0, 0) = 2;
  p.k.view().at<float>(1, 0) = -1;
  for (int i = 0; i < 2; ++i) {
    p.q.view().at<float>(i, 0, 0) = 3;
    p.q.view().at<float>(i, 1, 0) = -3;
    p.weights.view().at<float>(i, 0) = 10;
    p.weights.view().at<float>(i, 1) = -100;
  }
  const float nan = std::nanf("");
  p.set_indices({0, 1, 0, 0, -1, 4});
  p.set_d_scores({1, 2, 4, 8, nan, nan});
  EXPECT_EQ(to_string(backward(p.args())), "cpu");
  // Query 0: head 0 is active in row 0 (dot 6), head 1 in row 1 (dot 3).
  EXPECT_EQ(p.d_weights.view().at<float>(0, 0), (1 + 4) * 6);
  EXPECT_EQ(p.d_weights.view().at<float>(0, 1), 2 * 3);
  EXPECT_EQ(p.dq.view().at<float>(0, 0, 0), (1 + 4) * 10 * 2);
  EXPECT_EQ(p.dq.view().at<float>(0, 1, 0), 2 * -100 * -1);
  EXPECT_EQ(p.d_weights.view().at<float>(1, 0), 8 * 6);
  EXPECT_EQ(p.d_weights.view().at<float>(1, 1), 0);
  EXPECT_EQ(p.dq.view().at<float>(1, 0, 0), 8 * 10 * 2);
  EXPECT_EQ(p.dq.view().at<float>(1, 1, 0), 0);
  EXPECT_EQ(p.dk.view().at<float>(0, 0), (1 + 4 + 8) * 10 * 3);
  EXPECT_EQ(p.dk.view().at<float>(1, 0), 2 * -100 * -3);
  EXPECT_EQ(p.dk.view().at<float>(2, 0), 0);
  EXPECT_EQ(p.dk.view().at<float>(0, 1), 0);
}

TEST(IndexerBackward, SpecialValues) {
  Problem p;
  const float nan = std::nanf(""), inf = std::numeric_limits<float>::infinity();
  for (int t = 0; t < 3; ++t) p.k.view().at<float>(t, 0) = t == 1 ? -1.0f : 1.0f;
  for (int c = 0; c < 64; ++c) p.k.view().at<float>(3, c) = nan;
  for (int i = 0; i < 2; ++i) p.q.view().at<float>(i, 0, 0) = 1;
  winnow::testing::fill(p.weights, 1);
  p.set_indices({0, 1, 2, 0, 3, -1});
  p.set_d_scores({1, nan, inf, 1, nan, nan});
  Tensor end(DType::i32, {2});
  end.values<std::int32_t>()[0] = end.values<std::int32_t>()[1] = 3;  // the row of NaN is hidden
  BackwardArgs args = p.args();
  args.key_end = end;
  backward(args);
  // Where no dot is above 0, d_dot is 0 whatever d_scores holds; d_weights multiplies by 0.
  EXPECT_EQ(p.dq.view().at<float>(0, 0, 0), inf);
  EXPECT_EQ(p.dq.view().at<float>(0, 1, 0), 0);
  EXPECT_TRUE(std::isnan(p.d_weights.view().at<float>(0, 0)));
  EXPECT_EQ(p.dk.view().at<float>(0, 0), 2);
  EXPECT_EQ(p.dk.view().at<float>(1, 0), 0);
  EXPECT_EQ(p.dk.view().at<float>(2, 0), inf);
  EXPECT_EQ(p.dk.view().at<float>(3, 0), 0);
  EXPECT_EQ(p.dq.view().at<float>(1, 0, 0), 1);
  EXPECT_EQ(p.d_weights.view().at<float>(1, 0), 1);
  // Seen, it goes through the formulas.
  args.key_end = {};
  backward(args);
  EXPECT_TRUE(std::isnan(p.dq.view().at<float>(1, 0, 0)));
  EXPECT_TRUE(std::isnan(p.d_weights.view().at<float>(1, 0)));
  EXPECT_EQ(p.dk.view().at<float>(3, 0), 0);
}

TEST(IndexerBackward, DoesNotDependOnThreads) {
  for (const bool dense : {false, true}) {
    // More queries and columns than are worked on at once.
    const CaseShape shape{
        .name = "threads", .dtype = DType::bf16, .s_q = 70, .h = 3, .s_k = 1500, .topk = 1100};
    const CaseInputs inputs = make_inputs(shape);
    winnow::testing::Random random(3);
    Tensor indices(DType::i32, {shape.s_q, shape.topk});
    winnow::testing::fill_below(indices, random, 50);  // many meet in a row
    Tensor d_scores(DType::f32, {shape.s_q, dense ? shape.s_k : shape.topk});
    winnow::testing::fill_normal(d_scores, random);
    std::vector<Tensor> results;
    for (const int threads : {1, 2, 7}) {
      const winnow::testing::Threads number(threads);
      Tensor dq(DType::f32, {shape.s_q, shape.h, shape.d}), dk(DType::f32, {shape.s_k, shape.d});
      Tensor d_weights(DType::f32, {shape.s_q, shape.h});
      BackwardArgs args{.d_scores = d_scores, .dq = dq, .dk = dk, .d_weights = d_weights};
      if (!dense) args.indices = indices;
      inputs.pass_to(args);
      backward(args);
      for (Tensor* result : {&dq, &dk, &d_weights}) results.push_back(std::move(*result));
    }
    for (std::size_t n = 3; n < results.size(); ++n) {
      EXPECT_TRUE(winnow::testing::same_bytes(results[n % 3], results[n])) << n;
    }
  }
}

TEST(IndexerBackward, NoQueriesAndNoWorkspaceOnTheCpu) {
  Tensor q(DType::f32, {0, 1, 64}), k(DType::f32, {4, 64}), weights(DType::f32, {0, 1});
  Tensor d_scores(DType::f32, {0, 4}), dk(DType::f32, {4, 64});
  winnow::testing::fill_unwritten(dk);
  const BackwardArgs args{.q = q,
                          .k = k,
                          .weights = weights,
                          .d_scores = d_scores,
                          .dq = q.view(),
                          .dk = dk,
                          .d_weights = weights.view()};
  EXPECT_EQ(to_string(backward(args)), "cpu");
  EXPECT_EQ(backward_workspace_bytes(args), 0);
  expect_all(dk, 0);
}

// Bends the arguments, expects the refusal with the outputs untouched.
void reject(const std::function<void(BackwardArgs&)>& bend, const std::string& text) {
  Problem problem;
  BackwardArgs args = problem.args();
  bend(args);
  for (Tensor* output : {&problem.dq, &problem.dk, &problem.d_weights}) {
    winnow::testing::fill_unwritten(*output);
  }
  expect_refused(backward, args, "indexer::backward: " + text,
                 {problem.dq, problem.dk, problem.d_weights});
}

TEST(IndexerBackward, Refuses) {
  using Args = BackwardArgs;
  Tensor flat(DType::i32, {6}), wide(DType::i64, {2, 3}), scale(DType::f32, {4});
  Tensor dense(DType::f32, {2, 4}), half(DType::f16, {2, 3}), narrow(DType::bf16, {4, 64});
  Tensor q8(DType::f8_e4m3, {2, 2, 64}), k8(DType::f8_e4m3, {4, 64});
  Tensor weights3(DType::f32, {2, 3}), dq_half(DType::f16, {2, 2, 64});
  reject([](Args& a) { a.q = {}; }, "q: want a tensor [s_q, h, d], got none");
  reject([&](Args& a) { a.weights = weights3; }, "weights: want shape [s_q=2, h=2], got [2, 3]");
  reject([&](Args& a) { a.indices = flat; },
         "indices: want 2 dimensions [s_q, topk], got shape [6]");
  reject([&](Args& a) { a.indices = wide; }, "indices: want dtype i32, got i64");
  reject([&](Args& a) { a.indices = {}; }, "d_scores: want shape [s_q=2, s_k=4], got [2, 3]");
  reject([&](Args& a) { a.d_scores = dense; }, "d_scores: want shape [s_q=2, topk=3], got [2, 4]");
  reject([&](Args& a) { a.d_scores = half; }, "d_scores: want dtype f32, got f16");
  reject([](Args& a) { a.d_scores = {}; },
         "d_scores: want a tensor of shape [s_q=2, topk=3], got none");
  reject([&](Args& a) { a.dk = narrow; }, "dk: want dtype f32, got bf16");
  reject([&](Args& a) { a.dq = dq_half; }, "dq: want dtype f32, got f16");
  reject([&](Args& a) { a.d_weights = dense; }, "d_weights: want shape [s_q=2, h=2], got [2, 4]");
  reject([&](Args& a) { a.k_scale = scale; },
         "k_scale: want none, for keys that are not f8_e4m3, got a tensor");
  reject(
      [&](Args& a) {
        a.q = q8;
        a.k = k8;
        a.k_scale = scale;
        a.dq = TensorView(q8.data(), DType::f8_e4m3, {2, 2, 64});
      },
      "dq: want dtype f32 or bf16, got f8_e4m3");
  reject([](Args& a) { a.k_stride = 2; }, "k_stride: want 1 where q_start is absent, got 2");
}

TEST(IndexerBackward, RefusesOverlap) {
  Problem problem;
  BackwardArgs args = problem.args();
  args.dk = TensorView(problem.k.data(), DType::f32, {4, 64});
  expect_error([&] { backward(args); }, ErrorCode::invalid_argument,
               "indexer::backward: dk: want memory apart from k, got memory that both use");
}

}  // namespace
}  // namespace winnow::indexer
