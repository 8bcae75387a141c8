// compressor::forward: the case table, rows worked by hand, what it refuses, and what its results
// do not depend on.
#include <cmath>
#include <functional>
#include <limits>

#include <gtest/gtest.h>

#include "winnow/compressor/cases.h"
#include "winnow/compressor/forward/forward.h"
#include "winnow/testing/expect.h"

namespace winnow::compressor {
namespace {

using winnow::testing::expect_error;
using winnow::testing::expect_refused;

WINNOW_CASE_TABLE(CompressorForwardCase, "compressor::forward");

// Tensors of one call, zeros: sequences of 5 and 2 tokens by 2, with overlap, d = 8.
struct Problem {
  Tensor kv{DType::f32, {7, 16}}, gate{DType::f32, {7, 16}}, bias{DType::f32, {2, 16}};
  Tensor cu_seqlens{DType::i32, {3}}, cu_rows{DType::i32, {3}}, rows{DType::f32, {3, 8}};
  Tensor norm_weight{DType::f32, {8}}, cos{DType::f32, {6, 2}}, sin{DType::f32, {6, 2}};
  Tensor first_position{DType::i32, {2}};
  Problem() {
    set(cu_seqlens, {0, 5, 7});
    set(cu_rows, {0, 2, 3});
    winnow::testing::fill_unwritten(rows);
  }
  static void set(Tensor& tensor, std::initializer_list<std::int32_t> values) {
    std::copy(values.begin(), values.end(), tensor.values<std::int32_t>().begin());
  }
  ForwardArgs args() {
    return {.kv = kv,
            .gate = gate,
            .position_bias = bias,
            .cu_seqlens = cu_seqlens,
            .cu_rows = cu_rows,
            .overlap = true,
            .rows = rows};
  }
  ForwardArgs finished() {
    ForwardArgs all = args();
    all.norm_weight = norm_weight;
    all.cos = cos;
    all.sin = sin;
    all.first_position = first_position;
    return all;
  }
  float row(int w, int c) { return rows.view().at<float>(w, c); }
};

// Column 0 of the first series and of the second: tokens 0 to 6 have 1, 2, 4, ... and 100, 200, ...
TEST(CompressorForward, ByHand) {
  Problem p;
  for (int t = 0; t < 7; ++t) {
    p.kv.view().at<float>(t, 0) = float(1 << t);
    p.kv.view().at<float>(t, 8) = 100.0f * float(1 << t);
  }
  EXPECT_EQ(to_string(forward(p.args())), "cpu");
  EXPECT_FLOAT_EQ(p.row(0, 0), (100 + 200) / 2.0f);          // nothing stands before
  EXPECT_FLOAT_EQ(p.row(1, 0), (1 + 2 + 400 + 800) / 4.0f);  // token 4 has no row
  EXPECT_FLOAT_EQ(p.row(2, 0), (3200 + 6400) / 2.0f);        // a sequence of its own
  EXPECT_EQ(p.row(1, 1), 0);
  // Weights of 3 : 1 by a gate and by the bias of the same place.
  p.gate.view().at<float>(2, 8) = std::log(3.0f);
  p.bias.view().at<float>(1, 8) = std::log(5.0f);
  p.bias.view().at<float>(1, 0) = std::log(7.0f);
  forward(p.args());
  EXPECT_FLOAT_EQ(p.row(0, 0), (100 + 5 * 200) / 6.0f);
  EXPECT_FLOAT_EQ(p.row(1, 0), (1 + 7 * 2 + 3 * 400 + 5 * 800) / 16.0f);
  ForwardArgs plain = p.args();
  Tensor wide(DType::f32, {3, 16});
  plain.overlap = false;
  plain.rows = wide;
  forward(plain);
  EXPECT_FLOAT_EQ(wide.view().at<float>(1, 0), (4 + 7 * 8) / 8.0f);
  EXPECT_FLOAT_EQ(wide.view().at<float>(1, 8), (3 * 400 + 5 * 800) / 8.0f);
}

TEST(CompressorForward, NormRotationAndTransformByHand) {
  Problem p;
  const float value[] = {1, -1, 1, 1, 3, 3, 1, -3};  // mean of the squares: 4
  for (int t = 0; t < 7; ++t) {
    for (int c = 0; c < 8; ++c)
      p.kv.view().at<float>(t, 8 + c) = p.kv.view().at<float>(t, c) = value[c];
  }
  for (int c = 0; c < 8; ++c) p.norm_weight.values<float>()[c] = c == 0 ? 10.0f : 2.0f;
  winnow::testing::fill(p.cos, 1);
  p.cos.view().at<float>(5, 1) = 0;  // a quarter turn of the last pair at position 5 alone
  p.sin.view().at<float>(5, 1) = 1;
  Problem::set(p.first_position, {3, 1});  // the second window of the first sequence is at 5
  ForwardArgs args = p.finished();
  args.eps = 0;
  forward(args);
  const float normed[] = {5, -1, 1, 1, 3, 3, 1, -3}, turned[] = {5, -1, 1, 1, 3, 3, 3, 1};
  for (int c = 0; c < 8; ++c) {
    EXPECT_FLOAT_EQ(p.row(0, c), normed[c]) << c;
    EXPECT_FLOAT_EQ(p.row(1, c), turned[c]) << c;
    EXPECT_FLOAT_EQ(p.row(2, c), normed[c]) << c;
  }
  args.hadamard = true;
  forward(args);
  EXPECT_FLOAT_EQ(p.row(1, 0), (5 - 1 + 1 + 1 + 3 + 3 + 3 + 1) / std::sqrt(8.0f));
  EXPECT_FLOAT_EQ(p.row(1, 5), (5 + 1 + 1 - 1 - 3 + 3 - 3 + 1) / std::sqrt(8.0f));
  args.eps = 12;  // rows are halved
  args.hadamard = false;
  forward(args);
  EXPECT_FLOAT_EQ(p.row(0, 4), 1.5f);
}

TEST(CompressorForward, DoesNotDependOnThreadsOrNeighbours) {
  CaseShape shape{.name = "threads",
                  .dtype = DType::bf16,
                  .lengths = {300, 1, 77, 4},
                  .norm = true,
                  .hadamard = true,
                  .pairs = 8,
                  .poison = false};
  const CaseInputs inputs = make_inputs(shape);
  Tensor rows(DType::bf16, {shape.rows(), shape.d}), again = rows.clone(), one = rows.clone();
  ForwardArgs args{.rows = rows};
  inputs.pass_to(args);
  for (const auto& [into, threads] : {std::pair(rows.view(), 1), {again.view(), 5}}) {
    const winnow::testing::Threads number(threads);
    args.rows = into;
    forward(args);
  }
  EXPECT_TRUE(winnow::testing::same_bytes(rows, again));
  // Each sequence in a call of its own.
  args.kv = inputs.kv.view.slice(0, 301, 378);
  args.gate = inputs.gate.view.slice(0, 301, 378);
  Tensor lengths(DType::i32, {2}), counts(DType::i32, {2});
  lengths.values<std::int32_t>()[1] = 77;
  counts.values<std::int32_t>()[1] = 19;
  args.cu_seqlens = lengths;
  args.cu_rows = counts;
  args.rows = one.view().slice(0, 75, 94);
  forward(args);
  EXPECT_EQ(winnow::testing::read(args.rows), winnow::testing::read(rows.view().slice(0, 75, 94)));
}

// Bends the arguments, expects the refusal with the rows untouched.
void refused(const std::string& text, const std::function<void(Problem&, ForwardArgs&)>& bend,
             bool dry = true) {
  Problem problem;
  ForwardArgs args = problem.finished();
  bend(problem, args);
  expect_refused(forward, args, "compressor::forward: " + text, {problem.rows}, dry);
}

TEST(CompressorForward, Refuses) {
  Tensor ints(DType::i32, {7, 16}), odd(DType::f32, {7, 20}), wide(DType::f32, {7, 2048});
  Tensor half(DType::f16, {7, 16}), short_gate(DType::f32, {6, 16}), tall(DType::f32, {129, 16});
  Tensor none(DType::i32, {0}), long_list(DType::i64, {3}), four(DType::i32, {4});
  Tensor rows16(DType::f32, {3, 16}), rows_half(DType::f16, {3, 8}), d24(DType::f32, {3, 24});
  Tensor kv48(DType::f32, {7, 48}), bias48(DType::f32, {2, 48}), three(DType::f32, {3});
  Tensor five(DType::f32, {6, 5}), seven(DType::f32, {7});
  refused("kv: want a tensor [tokens, columns], got none", [](auto&, auto& a) { a.kv = {}; });
  refused("kv: want dtype f32 or f16 or bf16 or f64, got i32",
          [&](auto&, auto& a) { a.kv = ints; });
  refused("kv: want 2 * d columns, d a multiple of 8 up to 512, got 20",
          [&](auto&, auto& a) { a.kv = odd; });
  refused("kv: want 2 * d columns, d a multiple of 8 up to 512, got 2048",
          [&](auto&, auto& a) { a.kv = wide; });
  refused("kv: want d columns, d a multiple of 8 up to 512, got 20", [&](auto&, auto& a) {
    a.kv = odd;
    a.overlap = false;
  });
  refused("gate: want shape [tokens=7, columns=16], got [6, 16]",
          [&](auto&, auto& a) { a.gate = short_gate; });
  refused("gate: want dtype f32, got f16", [&](auto&, auto& a) { a.gate = half; });
  refused("position_bias: want a ratio of 1 to 128 rows, got 129",
          [&](auto&, auto& a) { a.position_bias = tall; });
  refused("position_bias: want dtype f32, got f16",
          [&](auto&, auto& a) { a.position_bias = half; });
  refused("cu_seqlens: want a number more than sequences, got none",
          [&](auto&, auto& a) { a.cu_seqlens = none; });
  refused("cu_seqlens: want dtype i32, got i64", [&](auto&, auto& a) { a.cu_seqlens = long_list; });
  refused("cu_rows: want shape [n + 1=3], got [4]", [&](auto&, auto& a) { a.cu_rows = four; });
  refused("rows: want d = 8 columns, half as many as kv, got 16",
          [&](auto&, auto& a) { a.rows = rows16; });
  refused("rows: want dtype f32, got f16", [&](auto&, auto& a) { a.rows = rows_half; });
  refused("norm_weight: want shape [d=8], got [3]", [&](auto&, auto& a) { a.norm_weight = three; });
  refused("eps: want at least 0, got -1.000000", [](auto&, auto& a) { a.eps = -1; });
  refused("eps: want a finite number, got nan", [](auto&, auto& a) { a.eps = std::nan(""); });
  refused("eps: want none, where norm_weight is absent, got a number", [](auto&, auto& a) {
    a.norm_weight = {};
    a.eps = 1e-6;
  });
  refused("sin: want a tensor, as cos is, got none", [](auto&, auto& a) { a.sin = {}; });
  refused("sin: want none, where cos is absent, got a tensor", [](auto&, auto& a) { a.cos = {}; });
  refused("cos: want up to d / 2 = 4 columns, got 5", [&](auto&, auto& a) {
    a.cos = five;
    a.sin = five;
  });
  refused("first_position: want shape [n=2], got [4]",
          [&](auto&, auto& a) { a.first_position = four; });
  refused("rstd: want shape [rows=3], got [7]", [&](auto&, auto& a) { a.rstd = seven; });
  refused("rstd: want dtype f32, got i64", [&](auto&, auto& a) { a.rstd = long_list; });
  refused("rstd: want none, where norm_weight is absent, got a tensor", [&](auto&, auto& a) {
    a.norm_weight = {};
    a.rstd = seven;
  });
  refused("hadamard: want d a power of two, got d = 24", [&](auto&, auto& a) {
    a.kv = kv48;
    a.gate = kv48;
    a.position_bias = bias48;
    a.rows = d24;
    a.norm_weight = {};
    a.hadamard = true;
  });
}

TEST(CompressorForward, RefusesContentsAndOverlap) {
  const auto reject = [](const std::string& text,
                         const std::function<void(Problem&, ForwardArgs&)>& bend) {
    refused(text, bend, false);
  };
  reject("cu_seqlens: want 0 first, got 1",
         [](auto& p, auto&) { Problem::set(p.cu_seqlens, {1, 5, 7}); });
  reject("cu_seqlens: want no number below the one before, got 4 after 5 at place 2",
         [](auto& p, auto&) { Problem::set(p.cu_seqlens, {0, 5, 4}); });
  reject("cu_seqlens: want 7 last, the tokens of kv, got 6", [](auto& p, auto&) {
    Problem::set(p.cu_seqlens, {0, 5, 6});
    Problem::set(p.cu_rows, {0, 2, 2});
  });
  reject("cu_rows: want 0 at place 0, the rows of the sequences before, got 1",
         [](auto& p, auto&) { Problem::set(p.cu_rows, {1, 2, 3}); });
  reject("cu_rows: want 2 at place 1, the rows of the sequences before, got 3",
         [](auto& p, auto&) { Problem::set(p.cu_rows, {0, 3, 4}); });
  reject("rows: want 3 rows, the last of cu_rows, got 2",
         [](auto& p, auto& a) { a.rows = p.rows.view().slice(0, 0, 2); });
  reject("first_position: want positions of at least 0, got -1 for sequence 1",
         [](auto& p, auto&) { Problem::set(p.first_position, {0, -1}); });
  reject("cos: want a row for position 6, where a window of sequence 0 begins, got 6 rows",
         [](auto& p, auto&) { Problem::set(p.first_position, {4, 0}); });
  Problem p;
  ForwardArgs args = p.args();
  args.rows = TensorView(p.gate.data(), DType::f32, {3, 8});
  expect_error([&] { forward(args); }, ErrorCode::invalid_argument,
               "compressor::forward: rows: want memory apart from gate, got memory that both use");
}

}  // namespace
}  // namespace winnow::compressor
