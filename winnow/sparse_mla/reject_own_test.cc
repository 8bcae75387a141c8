// What each sparse MLA operation refuses of the outputs and inputs that only it has, with the text
// of the message.
#include <functional>
#include <string>

#include <gtest/gtest.h>

#include "winnow/sparse_mla/test_reject.h"

namespace winnow::sparse_mla {
namespace {

using winnow::testing::expect_error;

TEST(RejectsForward, Tensors) {
  using Bend = std::function<void(ForwardArgs&, TestProblem&)>;
  const auto rejected = [](const Bend& bend, const std::string& text) {
    expect_rejected<ForwardOp>(bend, text);
  };
  rejected([](ForwardArgs& args, TestProblem&) { args.out = {}; },
           "out: want a tensor of shape [s_q=2, h_q=3, d_v=512], got none");
  rejected([](ForwardArgs& args,
              TestProblem& p) { args.out = TensorView(p.out.data(), DType::bf16, {2, 3, 512}); },
           "out: want dtype f32, got bf16");
  rejected([](ForwardArgs& args,
              TestProblem& p) { args.out = TensorView(p.out.data(), DType::f32, {2, 3, 256}); },
           "out: want shape [s_q=2, h_q=3, d_v=512], got [2, 3, 256]");
  rejected(
      [](ForwardArgs& args, TestProblem& p) {
        args.out = TensorView(p.out.data(), DType::f32, {2, 3, 512}, {0, 512, 1});
      },
      "out: want an output whose elements do not share memory, got shape [2, 3, 512] with strides "
      "[0, 512, 1]");
  rejected(
      [](ForwardArgs& args, TestProblem& p) {
        args.out = TensorView(p.out.data(), DType::f32, {2, 3, 512}, {1024, 512, 1});
      },
      "out: want an output whose elements do not share memory, got shape [2, 3, 512] with strides "
      "[1024, 512, 1]");
  rejected([](ForwardArgs& args,
              TestProblem& p) { args.lse = TensorView(p.lse.data(), DType::f32, {2, 3}, {2, 1}); },
           "lse: want an output whose elements do not share memory, got shape [2, 3] with strides "
           "[2, 1]");
  rejected(
      [](ForwardArgs& args, TestProblem& p) {
        args.max_logits = TensorView(p.max_logits.data(), DType::f16, {2, 3});
      },
      "max_logits: want dtype f32, got f16");
  rejected([](ForwardArgs& args,
              TestProblem& p) { args.lse = TensorView(p.lse.data(), DType::f32, {3, 2}); },
           "lse: want shape [s_q=2, h_q=3], got [3, 2]");
  rejected(
      [](ForwardArgs& args, TestProblem& p) {
        args.attn_sink = ConstTensorView(p.attn_sink.data(), DType::f32, {2});
      },
      "attn_sink: want shape [h_q=3], got [2]");
  rejected(
      [](ForwardArgs& args, TestProblem& p) {
        args.attn_sink = ConstTensorView(p.attn_sink.data(), DType::bf16, {3});
      },
      "attn_sink: want dtype f32, got bf16");
}

// Memory that an output shares with another argument. A dry run does not look at memory.
template <class Op>
void expect_apart(const std::function<void(typename Op::Args&, TestProblem&)>& bend,
                  const std::string& text) {
  TestProblem problem(Sizes{});
  typename Op::Args bent = Op::args(problem);
  bend(bent, problem);
  expect_error([&] { Op::run(bent, {}); }, ErrorCode::invalid_argument,
               std::string(Op::kName) + ": " + text);
  EXPECT_EQ(to_string(Op::run(bent, {.dry_run = true})), "cpu") << text;
}

TEST(RejectsForward, OutputsThatOverlap) {
  expect_apart<ForwardOp>(
      [](ForwardArgs& args, TestProblem& p) {
        args.out = TensorView(p.q.data(), DType::f32, {2, 3, 512});
      },
      "out: want memory apart from q, got memory that both use");
  expect_apart<ForwardOp>(
      [](ForwardArgs& args, TestProblem& p) {
        args.lse = TensorView(p.kv.data(), DType::f32, {2, 3});
      },
      "lse: want memory apart from kv, got memory that both use");
  expect_apart<ForwardOp>([](ForwardArgs& args, TestProblem&) { args.lse = args.max_logits; },
                          "lse: want memory apart from max_logits, got memory that both use");
}

TEST(RejectsForward, NoOutputsBetweenOtherRows) {
  TestProblem p(Sizes{});
  Tensor both(DType::f32, {2, 3, 1024});
  ForwardArgs args = ForwardOp::args(p);
  args.q = ConstTensorView(both.data(), DType::f32, {2, 3, 512}, {3072, 1024, 1});
  args.out = both.view().slice(2, 512, 1024);
  EXPECT_EQ(to_string(ForwardOp::run(args)), "cpu");
}

TEST(RejectsBackward, OutputsThatOverlap) {
  expect_apart<BackwardOp>(
      [](BackwardArgs& args, TestProblem& p) {
        args.dq = TensorView(p.q.data(), DType::f32, {2, 3, 512});
      },
      "dq: want memory apart from q, got memory that both use");
  expect_apart<BackwardOp>(
      [](BackwardArgs& args, TestProblem& p) {
        args.dkv = TensorView(p.dq.data(), DType::f32, {5, 1, 512});
      },
      "dkv: want memory apart from dq, got memory that both use");
}

TEST(RejectsDistribution, OutputsThatOverlap) {
  expect_apart<DistributionOp>(
      [](DistributionArgs& args, TestProblem& p) {
        args.attn_sum = TensorView(p.q.data(), DType::f32, {2, 4});
      },
      "attn_sum: want memory apart from q, got memory that both use");
}

TEST(RejectsDistribution, Tensors) {
  using Bend = std::function<void(DistributionArgs&, TestProblem&)>;
  const auto rejected = [](const Bend& bend, const std::string& text) {
    expect_rejected<DistributionOp>(bend, text);
  };
  rejected([](DistributionArgs& args, TestProblem&) { args.lse = {}; },
           "lse: want a tensor of shape [s_q=2, h_q=3], got none");
  rejected([](DistributionArgs& args,
              TestProblem& p) { args.lse = ConstTensorView(p.lse.data(), DType::f32, {2, 2}); },
           "lse: want shape [s_q=2, h_q=3], got [2, 2]");
  rejected([](DistributionArgs& args, TestProblem&) { args.attn_sum = {}; },
           "attn_sum: want a tensor of shape [s_q=2, topk=4], got none");
  rejected(
      [](DistributionArgs& args, TestProblem& p) {
        args.attn_sum = TensorView(p.attn_sum.data(), DType::bf16, {2, 4});
      },
      "attn_sum: want dtype f32, got bf16");
  rejected(
      [](DistributionArgs& args, TestProblem& p) {
        args.attn_sum = TensorView(p.attn_sum.data(), DType::f32, {2, 1, 4});
      },
      "attn_sum: want shape [s_q=2, topk=4], got [2, 1, 4]");
  rejected(
      [](DistributionArgs& args, TestProblem& p) {
        args.attn_sum = TensorView(p.attn_sum.data(), DType::f32, {2, 4}, {0, 1});
      },
      "attn_sum: want an output whose elements do not share memory, got shape [2, 4] with strides "
      "[0, 1]");
}

TEST(RejectsBackward, Tensors) {
  using Bend = std::function<void(BackwardArgs&, TestProblem&)>;
  const auto rejected = [](const Bend& bend, const std::string& text) {
    expect_rejected<BackwardOp>(bend, text);
  };
  rejected([](BackwardArgs& args, TestProblem&) { args.out = {}; },
           "out: want a tensor of shape [s_q=2, h_q=3, d_v=512], got none");
  rejected([](BackwardArgs& args, TestProblem&) { args.lse = {}; },
           "lse: want a tensor of shape [s_q=2, h_q=3], got none");
  rejected([](BackwardArgs& args, TestProblem&) { args.d_out = {}; },
           "d_out: want a tensor of shape [s_q=2, h_q=3, d_v=512], got none");
  rejected([](BackwardArgs& args, TestProblem&) { args.dq = {}; },
           "dq: want a tensor of shape [s_q=2, h_q=3, d_qk=512], got none");
  rejected([](BackwardArgs& args, TestProblem&) { args.dkv = {}; },
           "dkv: want a tensor of shape [s_kv=5, 1, d_qk=512], got none");
  rejected([](BackwardArgs& args,
              TestProblem& p) { args.delta = ConstTensorView(p.delta.data(), DType::f32, {2, 4}); },
           "delta: want shape [s_q=2, h_q=3], got [2, 4]");
  rejected(
      [](BackwardArgs& args, TestProblem& p) {
        args.d_out = ConstTensorView(p.d_out.data(), DType::bf16, {2, 3, 512});
      },
      "d_out: want dtype f32, got bf16");
  rejected(
      [](BackwardArgs& args, TestProblem& p) {
        args.dkv = TensorView(p.dkv.data(), DType::f32, {5, 1, 512}, {0, 0, 1});
      },
      "dkv: want an output whose elements do not share memory, got shape [5, 1, 512] with strides "
      "[0, 0, 1]");
  rejected([](BackwardArgs& args, TestProblem&) { args.attn_sink = {}; },
           "d_sink: want attn_sink to be given as well, got no attn_sink");
  rejected([](BackwardArgs& args,
              TestProblem& p) { args.d_sink = TensorView(p.d_sink.data(), DType::f32, {2}); },
           "d_sink: want shape [h_q=3], got [2]");
}

TEST(RejectsBackward, GradientsOfAThirdDType) {
  const Sizes sizes{.dtype = DType::bf16};
  expect_rejected<BackwardOp>(
      [](BackwardArgs& args, TestProblem& p) {
        args.dq = TensorView(p.dq.data(), DType::f16, {2, 3, 512});
      },
      "dq: want dtype bf16 or f32, got f16", sizes);
  expect_rejected<BackwardOp>(
      [](BackwardArgs& args, TestProblem& p) {
        args.dkv = TensorView(p.dkv.data(), DType::f16, {5, 1, 512});
      },
      "dkv: want dtype bf16 or f32, got f16", sizes);
}

TEST(RejectsBackward, F64BesideF32) {
  using Bend = std::function<void(BackwardArgs&, TestProblem&)>;
  const auto rejected = [](const Bend& bend, const std::string& text) {
    expect_rejected<BackwardOp>(bend, text, {.dtype = DType::f64});
  };
  const auto as_f32 = [](Tensor& tensor) {
    return TensorView(tensor.data(), DType::f32, tensor.view().shape());
  };
  rejected([&](BackwardArgs& args, TestProblem& p) { args.delta = as_f32(p.delta); },
           "delta: want dtype f64, got f32");
  rejected([&](BackwardArgs& args, TestProblem& p) { args.attn_sink = as_f32(p.attn_sink); },
           "attn_sink: want dtype f64, got f32");
  rejected([&](BackwardArgs& args, TestProblem& p) { args.d_sink = as_f32(p.d_sink); },
           "d_sink: want dtype f64, got f32");
  rejected([&](BackwardArgs& args, TestProblem& p) { args.dq = as_f32(p.dq); },
           "dq: want dtype f64, got f32");
  rejected([&](BackwardArgs& args, TestProblem& p) { args.dkv = as_f32(p.dkv); },
           "dkv: want dtype f64, got f32");
}

}  // namespace
}  // namespace winnow::sparse_mla
