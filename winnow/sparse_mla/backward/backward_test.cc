// sparse_mla::backward: the case table against the oracle, a problem worked by hand, a conservation
// law, and how special values travel. (python/tests/test_float64.py has finite differences.)
#include "winnow/sparse_mla/backward/backward.h"

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

WINNOW_CASE_TABLE(BackwardCase, "sparse_mla::backward");

// Weights 1/8, 2/8, 5/8 and the values 10, 20, 30 in column 1, as in forward_test.cc. d_out is 1 in
// column 1, so dP = (10, 20, 30), delta = 25 without a sink, and dS = P * (dP - 25).
TEST(Backward, ThreeRowsByHand) {
  for (const bool with_sink : {false, true}) {
    Tensor q(DType::f32, {1, 1, 512}), kv(DType::f32, {3, 1, 512}), indices(DType::i32, {1, 1, 3});
    Tensor out(DType::f32, {1, 1, 512}), lse(DType::f32, {1, 1}), d_out(DType::f32, {1, 1, 512});
    Tensor dq(DType::f32, {1, 1, 512}), dkv(DType::f32, {3, 1, 512});
    Tensor sink(DType::f32, {1}), d_sink(DType::f32, {1});
    const double weights[] = {1, 2, 5}, values[] = {10, 20, 30};
    // A sink of weight 8 halves every P; delta is halved too.
    const double denominator = with_sink ? 16 : 8, delta = with_sink ? 12.5 : 25;
    q.view().at<float>(0, 0, 0) = 1;
    for (int t = 0; t < 3; ++t) {
      kv.view().at<float>(t, 0, 0) = float(std::log(weights[t]));
      kv.view().at<float>(t, 0, 1) = float(values[t]);
      indices.view().at<std::int32_t>(0, 0, t) = t;
    }
    out.view().at<float>(0, 0, 1) = float(delta);
    d_out.view().at<float>(0, 0, 1) = 1;
    lse.view().at<float>(0, 0) = std::log(8.0f);
    sink.view().at<float>(0) = std::log(8.0f);
    BackwardArgs args{.q = q,
                      .kv = kv,
                      .indices = indices,
                      .out = out,
                      .lse = lse,
                      .d_out = d_out,
                      .scale = 1.0,
                      .dq = dq,
                      .dkv = dkv};
    if (with_sink) {
      args.attn_sink = sink;
      args.d_sink = d_sink;
    }
    backward(args);

    std::vector<double> want_dq(512, 0.0), want_dkv(3 * 512, 0.0);
    for (int t = 0; t < 3; ++t) {
      const double p = weights[t] / denominator, ds = p * (values[t] - delta);
      want_dq[0] += ds * std::log(weights[t]);
      want_dq[1] += ds * values[t];
      want_dkv[t * 512 + 0] = ds;
      want_dkv[t * 512 + 1] = p;
    }
    const CaseShape shape;
    expect_passed(testing::compare("dq", dq, want_dq, tolerance(Quantity::dq, shape, 2)));
    expect_passed(testing::compare("dkv", dkv, want_dkv, tolerance(Quantity::dkv, shape, 2)));
    const double want_sink[] = {with_sink ? -0.5 * delta : 0.0};
    expect_passed(
        testing::compare("d_sink", d_sink, want_sink, tolerance(Quantity::d_sink, shape, 2)));
  }
}

// The same number added to a column of every row of kv moves out by that number in the first 512
// columns, and nothing in the others: so dkv summed over the rows is d_out summed over queries and
// heads, and 0.
TEST(Backward, ColumnsOfDkvAreConserved) {
  TestProblem p({.s_q = 5, .h_q = 4, .s_kv = 20, .topk = 16, .d_qk = 576});
  ForwardArgs forward_args = ForwardOp::args(p);
  BackwardArgs args = BackwardOp::args(p);
  forward_args.attn_sink = args.attn_sink = {};
  args.d_sink = {};
  forward(forward_args);
  backward(args);
  std::vector<double> sums(576, 0.0), expected(576, 0.0);
  for (std::int64_t t = 0; t < 20; ++t) {
    for (std::int64_t c = 0; c < 576; ++c) sums[c] += p.dkv.view().at<float>(t, 0, c);
  }
  for (std::int64_t i = 0; i < 5; ++i) {
    for (std::int64_t h = 0; h < 4; ++h) {
      for (std::int64_t c = 0; c < 512; ++c) expected[c] += p.d_out.view().at<float>(i, h, c);
    }
  }
  const std::int64_t shape[] = {576};
  expect_passed(testing::compare("column sums", sums, expected, shape,
                                 tolerance(Quantity::dkv, CaseShape{}, 5)));
}

TEST(Backward, GivenDeltaIsUsedInsteadOfOut) {
  TestProblem with_out, with_delta;
  backward(BackwardOp::args(with_out));
  for (std::int64_t i = 0; i < 2; ++i) {
    for (std::int64_t h = 0; h < 3; ++h) {
      const auto row = [&](const Tensor& tensor) { return oracle::row_of(tensor.view(), i, h); };
      with_delta.delta.view().at<float>(i, h) =
          float(oracle::dot(row(with_out.out), row(with_out.d_out), kValueDim));
    }
  }
  BackwardArgs args = BackwardOp::args(with_delta);
  args.out = {};
  args.delta = with_delta.delta;
  backward(args);
  const auto same = [](const char* what, const Tensor& a, const Tensor& b, Quantity quantity) {
    expect_passed(testing::compare(what, a, winnow::testing::read(b.view()),
                                   tolerance(quantity, CaseShape{}, 5)));
  };
  same("dq", with_delta.dq, with_out.dq, Quantity::dq);
  same("dkv", with_delta.dkv, with_out.dkv, Quantity::dkv);
  same("d_sink", with_delta.d_sink, with_out.d_sink, Quantity::d_sink);

  // An `out` beside delta is not looked at.
  TestProblem both;
  winnow::testing::fill(both.out, std::nan(""));
  args = BackwardOp::args(both);
  args.delta = with_delta.delta;
  backward(args);
  EXPECT_TRUE(same_bytes(both.dq, with_delta.dq));
  EXPECT_TRUE(same_bytes(both.dkv, with_delta.dkv));
}

// Nor does it let through what its head holds: the other heads go on as if it were not there.
TEST(Backward, HeadWithAnInfiniteSinkContributesNothing) {
  const auto run = [](float value) {
    TestProblem problem;
    problem.attn_sink.view().at<float>(1) = kInf;
    for (Tensor* tensor : {&problem.q, &problem.d_out, &problem.out}) {
      for (std::int64_t i = 0; i < 2; ++i) {
        winnow::testing::fill(tensor->view().slice(0, i, i + 1).slice(1, 1, 2), value);
      }
    }
    backward(BackwardOp::args(problem));
    return problem;
  };
  const TestProblem numbers = run(1), nans = run(std::nanf(""));
  EXPECT_TRUE(same_bytes(numbers.dq, nans.dq));
  EXPECT_TRUE(same_bytes(numbers.dkv, nans.dkv));
  EXPECT_TRUE(same_bytes(numbers.d_sink, nans.d_sink));
  expect_all(nans.dq.view().slice(1, 1, 2), 0);
}

// Gradients in the dtype of q are those in f32, rounded once.
TEST(Backward, NarrowGradientsAreRoundedOnce) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    const Sizes sizes{.s_q = 33, .h_q = 5, .s_kv = 40, .topk = 30, .dtype = dtype};
    TestProblem narrow(sizes), wide(sizes);
    Tensor dkv(dtype, {40, 1, 512}), dq(DType::f32, {33, 5, 512});
    BackwardArgs args = BackwardOp::args(narrow);
    args.dkv = dkv;
    backward(args);
    args = BackwardOp::args(wide);
    args.dq = dq;
    backward(args);
    const auto expect_rounded = [dtype](const Tensor& rounded, const Tensor& exact) {
      Tensor expected(dtype, rounded.view().shape());
      const auto values = exact.values<float>();
      for (std::size_t n = 0; n < values.size(); ++n) {
        if (dtype == DType::bf16) expected.values<BFloat16>()[n] = BFloat16(values[n]);
        if (dtype == DType::f16) expected.values<Half>()[n] = Half(values[n]);
      }
      EXPECT_TRUE(same_bytes(rounded, expected)) << to_string(dtype);
    };
    expect_rounded(dkv, wide.dkv);
    expect_rounded(narrow.dq, dq);
  }
}

// A query that sees nothing has no gradient and no part in any, whatever its own tensors hold.
TEST(Backward, NothingVisibleIsExactlyZero) {
  TestProblem problem;
  for (Tensor* tensor : {&problem.q, &problem.kv, &problem.out, &problem.d_out, &problem.lse}) {
    winnow::testing::fill(*tensor, std::nan(""));
  }
  for (std::int32_t& length : problem.topk_length.values<std::int32_t>()) length = -3;
  for (Tensor* output : BackwardOp::outputs(problem)) winnow::testing::fill_unwritten(*output);
  backward(BackwardOp::args(problem));
  for (Tensor* output : BackwardOp::outputs(problem)) expect_all(*output, 0);
}

// Query 0 uses rows 0 and 1, query 1 rows 2 and 3; nobody uses row 4.
TEST(Backward, NanReachesOnlyWhatUsesIt) {
  const auto run = [](auto spoil) {
    TestProblem problem;
    const std::int32_t rows[] = {0, 1, 0, 1, 2, 3, 3, 2};
    std::copy(std::begin(rows), std::end(rows), problem.indices.values<std::int32_t>().begin());
    spoil(problem);
    backward(BackwardOp::args(problem));
    return problem;
  };
  const TestProblem clean = run([](TestProblem&) {});
  // What query 1 touches is as before; what query 0 touches in `dq` is NaN.
  const auto expect_query_1_clean = [&](const TestProblem& spoilt) {
    const auto same = [](const ConstTensorView& a, const ConstTensorView& b) {
      return winnow::testing::read(a) == winnow::testing::read(b);
    };
    EXPECT_TRUE(same(spoilt.dq.view().slice(0, 1, 2), clean.dq.view().slice(0, 1, 2)));
    EXPECT_TRUE(same(spoilt.dkv.view().slice(0, 2, 5), clean.dkv.view().slice(0, 2, 5)));
    expect_all(spoilt.dkv.view().slice(0, 4, 5), 0);
  };
  const TestProblem in_kv =
      run([](TestProblem& p) { p.kv.view().at<float>(1, 0, 9) = std::nanf(""); });
  expect_query_1_clean(in_kv);
  expect_all(in_kv.dq.view().slice(0, 0, 1), std::nan(""));
  expect_all(in_kv.dkv.view().slice(0, 1, 2), std::nan(""));
  const TestProblem in_q =
      run([](TestProblem& p) { p.q.view().at<float>(0, 1, 9) = std::nanf(""); });
  expect_query_1_clean(in_q);
  expect_all(in_q.dq.view().slice(0, 0, 1).slice(1, 1, 2), std::nan(""));
  expect_all(in_q.dkv.view().slice(0, 0, 2), std::nan(""));
  const TestProblem in_d_out =
      run([](TestProblem& p) { p.d_out.view().at<float>(0, 2, 9) = std::nanf(""); });
  expect_query_1_clean(in_d_out);
  expect_all(in_d_out.dq.view().slice(0, 0, 1).slice(1, 2, 3), std::nan(""));
}

}  // namespace
}  // namespace winnow::sparse_mla
