// compressor::backward: the case table, gradients worked by hand and by finite differences, what it
// refuses, and what its results do not depend on.
#include <cmath>
#include <functional>

#include <gtest/gtest.h>

#include "winnow/compressor/backward/backward.h"
#include "winnow/compressor/cases.h"
#include "winnow/compressor/forward/forward.h"
#include "winnow/testing/expect.h"

namespace winnow::compressor {
namespace {

using winnow::testing::expect_refused;

WINNOW_CASE_TABLE(CompressorBackwardCase, "compressor::backward");

// Outputs of a call on such inputs.
struct Gradients {
  CaseShape shape;
  CaseRows made;
  Tensor kv, gate, bias, norm_weight;

  explicit Gradients(const CaseShape& given)
      : shape(given),
        kv(shape.dtype, {shape.tokens(), shape.columns()}),
        gate(shape.dtype, {shape.tokens(), shape.columns()}),
        bias(accumulator_of(shape.dtype), {shape.ratio, shape.columns()}),
        norm_weight(accumulator_of(shape.dtype), {shape.d}) {
    for (Tensor* tensor : all()) winnow::testing::fill_unwritten(*tensor);
  }
  std::vector<Tensor*> all() { return {&kv, &gate, &bias, &norm_weight}; }
  BackwardArgs args(const CaseInputs& inputs, const Tensor& d_rows) {
    BackwardArgs args{.d_rows = d_rows, .d_kv = kv, .d_gate = gate, .d_position_bias = bias};
    inputs.pass_to(args);
    made = make_rows(shape, inputs);
    made.pass_to(args);
    if (args.norm_weight.present()) args.d_norm_weight = norm_weight;
    return args;
  }
};

// Two windows of two tokens and one token behind them. The weights are all 1/2 or, of the second
// window, 1/4; column 0 of the first series has kv 1, 3, 5, ..., that of the second 10, 20, ...
TEST(CompressorBackward, ByHand) {
  const CaseShape shape{
      .name = "hand", .lengths = {5}, .ratio = 2, .d = 8, .gates = Gates::equal, .poison = false};
  const CaseInputs inputs = make_inputs(shape);
  for (int t = 0; t < 5; ++t) {
    inputs.kv.view.at<float>(t, 0) = 1.0f + 2.0f * float(t);
    inputs.kv.view.at<float>(t, 8) = 10.0f + 10.0f * float(t);
  }
  Tensor d_rows(DType::f32, {2, 8});
  d_rows.view().at<float>(0, 0) = 4;
  d_rows.view().at<float>(1, 0) = 8;
  Gradients got(shape);
  EXPECT_EQ(to_string(backward(got.args(inputs, d_rows))), "cpu");
  const float sum = (1 + 3 + 30 + 40) / 4.0f;  // of the second window; of the first (10 + 20) / 2
  for (int t = 0; t < 2; ++t) {
    EXPECT_FLOAT_EQ(got.kv.view().at<float>(t, 0), 2);
    EXPECT_FLOAT_EQ(got.kv.view().at<float>(t, 8), 2);
    EXPECT_FLOAT_EQ(got.gate.view().at<float>(t, 0), 2 * (1 + 2 * float(t) - sum));
    EXPECT_FLOAT_EQ(got.gate.view().at<float>(t, 8), t == 0 ? -10 : 10);
    EXPECT_FLOAT_EQ(got.kv.view().at<float>(2 + t, 8), 2);
    EXPECT_FLOAT_EQ(got.gate.view().at<float>(2 + t, 8), 2 * (30 + 10 * float(t) - sum));
    EXPECT_FLOAT_EQ(got.bias.view().at<float>(t, 0), 2 * (1 + 2 * float(t) - sum));
    EXPECT_FLOAT_EQ(got.bias.view().at<float>(t, 8),
                    (t == 0 ? -10 : 10) + 2 * (30 + 10 * float(t) - sum));
  }
  for (int t = 2; t < 5; ++t) {  // would go to a third window
    EXPECT_EQ(got.kv.view().at<float>(t, 0), 0);
    EXPECT_EQ(got.gate.view().at<float>(t, 0), 0);
  }
  EXPECT_EQ(got.kv.view().at<float>(4, 8), 0);
  EXPECT_EQ(got.gate.view().at<float>(4, 8), 0);
}

// The rows of forward() in f64, weighed with d_rows: their slope along an input is the gradient.
TEST(CompressorBackward, FiniteDifferences) {
  for (const bool overlap : {false, true}) {
    const CaseShape shape{.name = "differences",
                          .dtype = DType::f64,
                          .lengths = {13, 7, 2},
                          .ratio = 3,
                          .d = 16,
                          .overlap = overlap,
                          .norm = true,
                          .hadamard = true,
                          .positions = true,
                          .pairs = 3,
                          .poison = false};
    const CaseInputs inputs = make_inputs(shape);
    Tensor d_rows(DType::f64, {shape.rows(), shape.d}), rows = d_rows.clone();
    winnow::testing::Random random(7);
    winnow::testing::fill_normal(d_rows, random);
    Gradients got(shape);
    backward(got.args(inputs, d_rows));
    const auto loss = [&] {
      ForwardArgs args{.rows = rows};
      inputs.pass_to(args);
      forward(args);
      double sum = 0;
      for (std::int64_t n = 0; n < rows.numel(); ++n) {
        sum += rows.values<double>()[n] * d_rows.values<double>()[n];
      }
      return sum;
    };
    const auto check = [&](const char* what, const StridedTensor& input, const Tensor& gradient) {
      for (std::int64_t n = 0; n < gradient.numel(); ++n) {
        double& value = static_cast<double*>(input.view.data())[n];
        const double before = value;
        constexpr double kStep = 0x1p-17;
        value = before + kStep;
        const double above = loss();
        value = before - kStep;
        const double below = loss();
        value = before;
        EXPECT_NEAR(gradient.values<double>()[n], (above - below) / (2 * kStep), 1e-7)
            << what << " " << n;
      }
    };
    check("kv", inputs.kv, got.kv);
    check("gate", inputs.gate, got.gate);
    check("position_bias", inputs.position_bias, got.bias);
    check("norm_weight", inputs.norm_weight, got.norm_weight);
  }
}

TEST(CompressorBackward, DoesNotDependOnThreads) {
  for (const bool overlap : {false, true}) {
    const CaseShape shape{.name = "threads",
                          .dtype = DType::bf16,
                          .lengths = {5000, 3, 77, 4},
                          .overlap = overlap,
                          .norm = true,
                          .pairs = 8,
                          .poison = false};
    const CaseInputs inputs = make_inputs(shape);
    Tensor d_rows(DType::bf16, {shape.rows(), shape.d});
    winnow::testing::Random random(3);
    winnow::testing::fill_normal(d_rows, random);
    std::vector<Gradients> results;
    for (const int threads : {1, 2, 7}) {
      const winnow::testing::Threads number(threads);
      results.emplace_back(shape);
      backward(results.back().args(inputs, d_rows));
    }
    for (std::size_t n = 1; n < results.size(); ++n) {
      for (std::size_t i = 0; i < 4; ++i) {
        EXPECT_TRUE(winnow::testing::same_bytes(*results[0].all()[i], *results[n].all()[i])) << i;
      }
    }
  }
}

TEST(CompressorBackward, Refuses) {
  const CaseShape shape{.name = "refused", .lengths = {5, 4}, .ratio = 2, .d = 8, .norm = true};
  const CaseInputs inputs = make_inputs(shape);
  Tensor d_rows(DType::f32, {4, 8}), wide(DType::f32, {4, 16}), half(DType::f16, {4, 8});
  Tensor eight(DType::f32, {8, 16}), brain(DType::bf16, {2, 16}), three(DType::f32, {3, 8});
  Tensor nine(DType::f32, {9}), of_three(DType::f32, {3});
  using Args = BackwardArgs;
  const auto reject = [&](const std::function<void(Args&)>& bend, const std::string& text,
                          bool dry = true) {
    Gradients got(shape);
    Args args = got.args(inputs, d_rows);
    bend(args);
    expect_refused(backward, args, "compressor::backward: " + text,
                   {got.kv, got.gate, got.bias, got.norm_weight}, dry);
  };
  reject([](Args& a) { a.kv = {}; }, "kv: want a tensor [tokens, columns], got none");
  reject([&](Args& a) { a.d_rows = wide; },
         "d_rows: want d = 8 columns, half as many as kv, got 16");
  reject([&](Args& a) { a.d_rows = half; }, "d_rows: want dtype f32, got f16");
  reject([&](Args& a) { a.d_kv = eight; }, "d_kv: want shape [tokens=9, columns=16], got [8, 16]");
  reject([](Args& a) { a.d_gate = {}; },
         "d_gate: want a tensor of shape [tokens=9, columns=16], got none");
  reject([&](Args& a) { a.d_position_bias = brain; }, "d_position_bias: want dtype f32, got bf16");
  reject([&](Args& a) { a.rows = three; }, "rows: want shape [rows=4, d=8], got [3, 8]");
  reject([&](Args& a) { a.rows = half; }, "rows: want dtype f32, got f16");
  reject([&](Args& a) { a.rstd = nine; }, "rstd: want shape [rows=4], got [9]");
  reject([](Args& a) { a.rows = {}; }, "rows: want a tensor, as norm_weight is, got none");
  reject([](Args& a) { a.rstd = {}; }, "rstd: want a tensor, as norm_weight is, got none");
  reject([](Args& a) { a.d_norm_weight = {}; },
         "d_norm_weight: want a tensor, as norm_weight is, got none");
  reject([](Args& a) { a.norm_weight = {}; },
         "rows: want none, where norm_weight is absent, got a tensor");
  reject([](Args& a) { a.norm_weight = {}, a.rows = {}; },
         "rstd: want none, where norm_weight is absent, got a tensor");
  reject([](Args& a) { a.norm_weight = {}, a.rows = {}, a.rstd = {}; },
         "d_norm_weight: want none, where norm_weight is absent, got a tensor");
  reject([&](Args& a) { a.d_rows = three, a.rows = three, a.rstd = of_three; },
         "d_rows: want 4 rows, the last of cu_rows, got 3", false);
  reject([](Args& a) { a.d_gate = a.d_kv; },
         "d_gate: want memory apart from d_kv, got memory that both use", false);
  reject([&](Args&) { inputs.cu_rows.view.at<std::int32_t>(1) = 3; },
         "cu_rows: want 2 at place 1, the rows of the sequences before, got 3", false);
}

}  // namespace
}  // namespace winnow::compressor
