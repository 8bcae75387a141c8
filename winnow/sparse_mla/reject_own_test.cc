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
  refused<ForwardOp>("out: want a tensor of shape [s_q=2, h_q=3, d_v=512], got none",
                     [](auto& args, auto&) { args.out = {}; });
  refused<ForwardOp>("out: want dtype f32, got bf16", [](auto& args, auto& p) {
    args.out = viewed(p.out, DType::bf16, {2, 3, 512});
  });
  refused<ForwardOp>(
      "out: want shape [s_q=2, h_q=3, d_v=512], got [2, 3, 256]",
      [](auto& args, auto& p) { args.out = viewed(p.out, DType::f32, {2, 3, 256}); });
  refused<ForwardOp>(
      "out: want an output whose elements do not share memory, got shape [2, 3, 512] with strides "
      "[0, 512, 1]",
      [](auto& args, auto& p) {
        args.out = TensorView(p.out.data(), DType::f32, {2, 3, 512}, {0, 512, 1});
      });
  refused<ForwardOp>(
      "out: want an output whose elements do not share memory, got shape [2, 3, 512] with strides "
      "[1024, 512, 1]",
      [](auto& args, auto& p) {
        args.out = TensorView(p.out.data(), DType::f32, {2, 3, 512}, {1024, 512, 1});
      });
  refused<ForwardOp>(
      "lse: want an output whose elements do not share memory, got shape [2, 3] with strides "
      "[2, 1]",
      [](auto& args, auto& p) { args.lse = TensorView(p.lse.data(), DType::f32, {2, 3}, {2, 1}); });
  refused<ForwardOp>("max_logits: want dtype f32, got f16", [](auto& args, auto& p) {
    args.max_logits = viewed(p.max_logits, DType::f16, {2, 3});
  });
  refused<ForwardOp>("lse: want shape [s_q=2, h_q=3], got [3, 2]",
                     [](auto& args, auto& p) { args.lse = viewed(p.lse, DType::f32, {3, 2}); });
  refused<ForwardOp>("attn_sink: want shape [h_q=3], got [2]", [](auto& args, auto& p) {
    args.attn_sink = viewed(p.attn_sink, DType::f32, {2});
  });
  refused<ForwardOp>("attn_sink: want dtype f32, got bf16", [](auto& args, auto& p) {
    args.attn_sink = viewed(p.attn_sink, DType::bf16, {3});
  });
}

// Memory that an output shares with another argument. A dry run does not look at memory.
template <class Op>
void expect_apart(const std::string& text,
                  const std::function<void(typename Op::Args&, TestProblem&)>& bend) {
  TestProblem problem(Sizes{});
  typename Op::Args bent = Op::args(problem);
  bend(bent, problem);
  expect_error([&] { Op::run(bent, {}); }, ErrorCode::invalid_argument,
               std::string(Op::kName) + ": " + text);
  EXPECT_EQ(to_string(Op::run(bent, {.dry_run = true})), "cpu") << text;
}

TEST(RejectsForward, OutputsThatOverlap) {
  expect_apart<ForwardOp>(
      "out: want memory apart from q, got memory that both use",
      [](auto& args, auto& p) { args.out = viewed(p.q, DType::f32, {2, 3, 512}); });
  expect_apart<ForwardOp>("lse: want memory apart from kv, got memory that both use",
                          [](auto& args, auto& p) { args.lse = viewed(p.kv, DType::f32, {2, 3}); });
  expect_apart<ForwardOp>("lse: want memory apart from max_logits, got memory that both use",
                          [](auto& args, auto&) { args.lse = args.max_logits; });
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
      "dq: want memory apart from q, got memory that both use",
      [](auto& args, auto& p) { args.dq = viewed(p.q, DType::f32, {2, 3, 512}); });
  expect_apart<BackwardOp>(
      "dkv: want memory apart from dq, got memory that both use",
      [](auto& args, auto& p) { args.dkv = viewed(p.dq, DType::f32, {5, 1, 512}); });
}

TEST(RejectsDistribution, OutputsThatOverlap) {
  expect_apart<DistributionOp>(
      "attn_sum: want memory apart from q, got memory that both use",
      [](auto& args, auto& p) { args.attn_sum = viewed(p.q, DType::f32, {2, 4}); });
}

TEST(RejectsDistribution, Tensors) {
  refused<DistributionOp>("lse: want a tensor of shape [s_q=2, h_q=3], got none",
                          [](auto& args, auto&) { args.lse = {}; });
  refused<DistributionOp>("lse: want shape [s_q=2, h_q=3], got [2, 2]", [](auto& args, auto& p) {
    args.lse = viewed(p.lse, DType::f32, {2, 2});
  });
  refused<DistributionOp>("attn_sum: want a tensor of shape [s_q=2, topk=4], got none",
                          [](auto& args, auto&) { args.attn_sum = {}; });
  refused<DistributionOp>("attn_sum: want dtype f32, got bf16", [](auto& args, auto& p) {
    args.attn_sum = viewed(p.attn_sum, DType::bf16, {2, 4});
  });
  refused<DistributionOp>(
      "attn_sum: want shape [s_q=2, topk=4], got [2, 1, 4]",
      [](auto& args, auto& p) { args.attn_sum = viewed(p.attn_sum, DType::f32, {2, 1, 4}); });
  refused<DistributionOp>(
      "attn_sum: want an output whose elements do not share memory, got shape [2, 4] with strides "
      "[0, 1]",
      [](auto& args, auto& p) {
        args.attn_sum = TensorView(p.attn_sum.data(), DType::f32, {2, 4}, {0, 1});
      });
}

TEST(RejectsBackward, Tensors) {
  refused<BackwardOp>("out: want a tensor of shape [s_q=2, h_q=3, d_v=512], got none",
                      [](auto& args, auto&) { args.out = {}; });
  refused<BackwardOp>("lse: want a tensor of shape [s_q=2, h_q=3], got none",
                      [](auto& args, auto&) { args.lse = {}; });
  refused<BackwardOp>("d_out: want a tensor of shape [s_q=2, h_q=3, d_v=512], got none",
                      [](auto& args, auto&) { args.d_out = {}; });
  refused<BackwardOp>("dq: want a tensor of shape [s_q=2, h_q=3, d_qk=512], got none",
                      [](auto& args, auto&) { args.dq = {}; });
  refused<BackwardOp>("dkv: want a tensor of shape [s_kv=5, 1, d_qk=512], got none",
                      [](auto& args, auto&) { args.dkv = {}; });
  refused<BackwardOp>("delta: want shape [s_q=2, h_q=3], got [2, 4]", [](auto& args, auto& p) {
    args.delta = viewed(p.delta, DType::f32, {2, 4});
  });
  refused<BackwardOp>("d_out: want dtype f32, got bf16", [](auto& args, auto& p) {
    args.d_out = viewed(p.d_out, DType::bf16, {2, 3, 512});
  });
  refused<BackwardOp>(
      "dkv: want an output whose elements do not share memory, got shape [5, 1, 512] with strides "
      "[0, 0, 1]",
      [](auto& args, auto& p) {
        args.dkv = TensorView(p.dkv.data(), DType::f32, {5, 1, 512}, {0, 0, 1});
      });
  refused<BackwardOp>("d_sink: want attn_sink to be given as well, got no attn_sink",
                      [](auto& args, auto&) { args.attn_sink = {}; });
  refused<BackwardOp>("d_sink: want shape [h_q=3], got [2]",
                      [](auto& args, auto& p) { args.d_sink = viewed(p.d_sink, DType::f32, {2}); });
}

TEST(RejectsBackward, GradientsOfAThirdDType) {
  const Sizes sizes{.dtype = DType::bf16};
  refused<BackwardOp>(
      "dq: want dtype bf16 or f32, got f16",
      [](auto& args, auto& p) { args.dq = viewed(p.dq, DType::f16, {2, 3, 512}); }, sizes);
  refused<BackwardOp>(
      "dkv: want dtype bf16 or f32, got f16",
      [](auto& args, auto& p) { args.dkv = viewed(p.dkv, DType::f16, {5, 1, 512}); }, sizes);
}

TEST(RejectsBackward, F64BesideF32) {
  using Bend = std::function<void(BackwardArgs&, TestProblem&)>;
  const auto rejected = [](const std::string& text, const Bend& bend) {
    refused<BackwardOp>(text, bend, {.dtype = DType::f64});
  };
  const auto as_f32 = [](Tensor& tensor) {
    return TensorView(tensor.data(), DType::f32, tensor.view().shape());
  };
  rejected("delta: want dtype f64, got f32",
           [&](auto& args, auto& p) { args.delta = as_f32(p.delta); });
  rejected("attn_sink: want dtype f64, got f32",
           [&](auto& args, auto& p) { args.attn_sink = as_f32(p.attn_sink); });
  rejected("d_sink: want dtype f64, got f32",
           [&](auto& args, auto& p) { args.d_sink = as_f32(p.d_sink); });
  rejected("dq: want dtype f64, got f32", [&](auto& args, auto& p) { args.dq = as_f32(p.dq); });
  rejected("dkv: want dtype f64, got f32", [&](auto& args, auto& p) { args.dkv = as_f32(p.dkv); });
}

}  // namespace
}  // namespace winnow::sparse_mla
