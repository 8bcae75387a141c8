// Tests of indexer::topk: the case table, a hand-computed problem, errors, independence of threads.
#include "winnow/indexer/topk/topk.h"

#include <cmath>
#include <functional>
#include <limits>

#include <gtest/gtest.h>

#include "winnow/indexer/cases.h"
#include "winnow/testing/expect.h"

namespace winnow::indexer {
namespace {

using winnow::testing::expect_error;
using winnow::testing::expect_refused;

WINNOW_CASE_TABLE(TopkCase, "indexer::topk");

// Tensors of one call, all zeros.
struct Problem {
  Tensor q{DType::f32, {2, 1, 64}}, k{DType::f32, {4, 64}}, weights{DType::f32, {2, 1}};
  Tensor indices{DType::i32, {2, 3}}, length{DType::i32, {2}}, scores{DType::f32, {2, 3}};
  TopkArgs args() {
    return {
        .q = q, .k = k, .weights = weights, .indices = indices, .length = length, .scores = scores};
  }
};

// Query 0 has the scores 1, 0, 5, NaN; query 1 has the weight -1 and sees rows 1 and 2.
TEST(Topk, ByHand) {
  Problem problem;
  const float keys[] = {1, -7, 5, std::nanf("")};
  for (int t = 0; t < 4; ++t) problem.k.view().at<float>(t, 0) = keys[t];
  for (int i = 0; i < 2; ++i) problem.q.view().at<float>(i, 0, 0) = 1;
  problem.weights.view().at<float>(0, 0) = 1;
  problem.weights.view().at<float>(1, 0) = -1;
  Tensor start(DType::i32, {2}), end(DType::i32, {2});
  start.values<std::int32_t>()[1] = 1;
  end.values<std::int32_t>()[0] = 100;
  end.values<std::int32_t>()[1] = 3;
  TopkArgs args = problem.args();
  args.key_start = start;
  args.key_end = end;
  EXPECT_EQ(to_string(topk(args)), "cpu");
  const std::int32_t expected[] = {0, 1, 2, 1, 2, -1};
  for (int n = 0; n < 6; ++n)
    EXPECT_EQ(problem.indices.values<std::int32_t>()[n], expected[n]) << n;
  EXPECT_EQ(problem.length.values<std::int32_t>()[0], 3);
  EXPECT_EQ(problem.length.values<std::int32_t>()[1], 2);
  const float scores[] = {1, 0, 5, 0, -5, -std::numeric_limits<float>::infinity()};
  for (int n = 0; n < 6; ++n) EXPECT_EQ(problem.scores.values<float>()[n], scores[n]) << n;
  EXPECT_FALSE(std::signbit(problem.scores.values<float>()[3]));  // the score is not -0
}

TEST(Topk, DoesNotDependOnThreads) {
  const CaseShape shape{.name = "threads", .dtype = DType::bf16, .s_q = 3, .h = 8, .s_k = 7000};
  const CaseInputs inputs = make_inputs(shape);
  std::vector<Tensor> results;
  for (const int threads : {1, 2, 7}) {
    const winnow::testing::Threads number(threads);
    Tensor indices(DType::i32, {shape.s_q, shape.topk}), length(DType::i32, {shape.s_q});
    TopkArgs args{.indices = indices, .length = length};
    inputs.pass_to(args);
    topk(args);
    results.push_back(std::move(indices));
  }
  EXPECT_TRUE(winnow::testing::same_bytes(results[0], results[1]));
  EXPECT_TRUE(winnow::testing::same_bytes(results[0], results[2]));
}

TEST(Topk, NoQueriesAndNoWorkspaceOnTheCpu) {
  Tensor q(DType::f32, {0, 1, 64}), k(DType::f32, {4, 64}), weights(DType::f32, {0, 1});
  Tensor indices(DType::i32, {0, 3}), length(DType::i32, {0});
  const TopkArgs args{.q = q, .k = k, .weights = weights, .indices = indices, .length = length};
  EXPECT_EQ(to_string(topk(args)), "cpu");
  EXPECT_EQ(topk_workspace_bytes(args), 0);
}

// Expects an error for the arguments that `bend` has changed, and no output written.
void reject(const std::function<void(TopkArgs&)>& bend, const std::string& text) {
  Problem problem;
  TopkArgs args = problem.args();
  bend(args);
  for (Tensor* output : {&problem.indices, &problem.length, &problem.scores}) {
    winnow::testing::fill_unwritten(*output);
  }
  expect_refused(topk, args, "indexer::topk: " + text,
                 {problem.indices, problem.length, problem.scores});
}

TEST(Topk, Refuses) {
  using Args = TopkArgs;
  Tensor q96(DType::f32, {2, 1, 96}), q129(DType::f32, {2, 129, 64}), q_int(DType::i32, {2, 1, 64});
  Tensor k32(DType::f32, {4, 32}), k_half(DType::f16, {4, 64}), scale(DType::f32, {4});
  Tensor weights3(DType::f32, {2, 3}), weights_half(DType::f16, {2, 1});
  Tensor none(DType::i32, {2, 0}), long_length(DType::i32, {3}), range(DType::i64, {2});
  Tensor q8(DType::f8_e4m3, {2, 1, 64}), k8(DType::f8_e4m3, {4, 64});
  reject([](Args& a) { a.q = {}; }, "q: want a tensor [s_q, h, d], got none");
  reject([](Args& a) { a.k = {}; }, "k: want a tensor [s_k, d], got none");
  reject([&](Args& a) { a.q = q96; }, "q: want d = 128 or 64, got d = 96");
  reject([&](Args& a) { a.q = q129; }, "q: want 1 to 128 heads, got 129");
  reject([&](Args& a) { a.q = q_int; }, "q: want dtype f32 or f16 or bf16 or f8_e4m3, got i32");
  reject([&](Args& a) { a.k = k32; }, "k: want shape [s_k=4, d=64], got [4, 32]");
  reject([&](Args& a) { a.k = k_half; }, "k: want dtype f32, got f16");
  reject([&](Args& a) { a.weights = weights3; }, "weights: want shape [s_q=2, h=1], got [2, 3]");
  reject([&](Args& a) { a.weights = weights_half; }, "weights: want dtype f32 or bf16, got f16");
  reject([&](Args& a) { a.k_scale = scale; },
         "k_scale: want none, for keys that are not f8_e4m3, got a tensor");
  reject(
      [&](Args& a) {
        a.q = q8;
        a.k = k8;
      },
      "k_scale: want a tensor [s_k], which f8_e4m3 keys need, got none");
  reject([&](Args& a) { a.key_start = range; }, "key_start: want dtype i32, got i64");
  reject([&](Args& a) { a.indices = none; }, "indices: want topk from 1 to 2^31 - 1, got 0");
  reject([&](Args& a) { a.length = long_length; }, "length: want shape [s_q=2], got [3]");
  reject([](Args& a) { a.k_stride = 0; }, "k_stride: want 1 or more, got 0");
  reject([](Args& a) { a.k_stride = 2; }, "k_stride: want 1 where q_start is absent, got 2");
}

TEST(Topk, RefusesOverlap) {
  Problem problem;
  TopkArgs args = problem.args();
  args.scores = TensorView(problem.q.data(), DType::f32, {2, 3});
  expect_error([&] { topk(args); }, ErrorCode::invalid_argument,
               "indexer::topk: scores: want memory apart from q, got memory that both use");
}

// More rows are chosen than the buffer of candidates holds.
TEST(Topk, MoreRowsThanTheBufferHolds) {
  constexpr std::int64_t s_k = 40000, topk_ = 33000;
  Tensor q(DType::f32, {1, 1, 64}), k(DType::f32, {s_k, 64}), weights(DType::f32, {1, 1});
  Tensor indices(DType::i32, {1, topk_}), length(DType::i32, {1});
  q.values<float>()[0] = 1;
  weights.values<float>()[0] = 1;
  for (std::int64_t t = 0; t < s_k; ++t) k.view().at<float>(t, 0) = float(t % 40);
  for (const Ties ties : {Ties::smaller, Ties::larger}) {
    topk({.q = q, .k = k, .weights = weights, .ties = ties, .indices = indices, .length = length});
    EXPECT_EQ(length.values<std::int32_t>()[0], topk_);
    // 33 of 40 values are chosen whole: those of 7 and more.
    for (std::int64_t j = 0; j < topk_; ++j) {
      const std::int32_t row = indices.values<std::int32_t>()[j];
      ASSERT_EQ(row, j / 33 * 40 + 7 + j % 33) << j;
    }
  }
}

}  // namespace
}  // namespace winnow::indexer
