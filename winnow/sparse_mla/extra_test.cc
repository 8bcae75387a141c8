// What the three sparse MLA operations refuse of a second source of rows, with the text of the
// message.
#include <cstdint>
#include <functional>
#include <string>

#include <gtest/gtest.h>

#include "winnow/core/check.h"
#include "winnow/sparse_mla/problem.h"
#include "winnow/sparse_mla/test_reject.h"

namespace winnow::sparse_mla {
namespace {

using winnow::testing::expect_error;

// Of the problem in test_problem.h.
struct Extra {
  Tensor kv{DType::f32, {7, 1, 512}}, indices{DType::i32, {2, 1, 6}}, length{DType::i32, {2}};

  template <class Args>
  void list(Args& args) {
    args.extra_kv = kv;
    args.extra_indices = indices;
  }
  template <class Args>
  void range(Args& args) {
    args.extra_kv = kv;
    args.extra_key_start = args.extra_key_end = length;
  }
};

template <class Op>
void extra_refused(const std::string& text,
                   const std::function<void(typename Op::Args&, Extra&)>& bend) {
  Extra extra;
  refused<Op>(text, [&](auto& args, auto&) { bend(args, extra); });
}

template <class Op>
class RejectsExtra : public ::testing::Test {};
using Operations = ::testing::Types<ForwardOp, DistributionOp, BackwardOp>;
TYPED_TEST_SUITE(RejectsExtra, Operations);

TYPED_TEST(RejectsExtra, ArgumentsWithoutExtraKv) {
  const std::string text = ": want none, without extra_kv, got a tensor";
  extra_refused<TypeParam>("extra_indices" + text,
                           [](auto& args, auto& extra) { args.extra_indices = extra.indices; });
  extra_refused<TypeParam>("extra_topk_length" + text,
                           [](auto& args, auto& extra) { args.extra_topk_length = extra.length; });
  extra_refused<TypeParam>("extra_key_start" + text,
                           [](auto& args, auto& extra) { args.extra_key_start = extra.length; });
  extra_refused<TypeParam>("extra_key_end" + text,
                           [](auto& args, auto& extra) { args.extra_key_end = extra.length; });
  extra_refused<TypeParam>("extra_k_stride: want 1, without extra_kv, got 4",
                           [](auto& args, auto&) {
                             args.q_start = 0;
                             args.extra_k_stride = 4;
                           });
}

TYPED_TEST(RejectsExtra, NeitherAListNorARange) {
  extra_refused<TypeParam>("extra_indices: want a tensor [s_q, 1, extra_topk], got none",
                           [](auto& args, auto& extra) { args.extra_kv = extra.kv; });
  extra_refused<TypeParam>("extra_key_start: want a tensor [s_q], beside extra_key_end, got none",
                           [](auto& args, auto& extra) {
                             extra.range(args);
                             args.extra_key_start = {};
                           });
  extra_refused<TypeParam>("extra_key_end: want a tensor [s_q], beside extra_key_start, got none",
                           [](auto& args, auto& extra) {
                             extra.range(args);
                             args.extra_key_end = {};
                           });
}

TYPED_TEST(RejectsExtra, AListAndARange) {
  extra_refused<TypeParam>("extra_key_end: want none, beside extra_indices, got a tensor",
                           [](auto& args, auto& extra) {
                             extra.list(args);
                             args.extra_key_end = extra.length;
                           });
  extra_refused<TypeParam>("extra_topk_length: want none, without extra_indices, got a tensor",
                           [](auto& args, auto& extra) {
                             extra.range(args);
                             args.extra_topk_length = extra.length;
                           });
}

TYPED_TEST(RejectsExtra, WrongTensors) {
  using Args = typename TypeParam::Args;
  const auto rejected = [](const std::string& text,
                           const std::function<void(Args&, Extra&)>& bend) {
    extra_refused<TypeParam>(text, [&](auto& args, auto& extra) {
      extra.list(args);
      bend(args, extra);
    });
  };
  rejected("extra_kv: want 3 dimensions [s_extra, 1, d_qk], got shape [7, 512]",
           [](auto& args, auto& extra) { args.extra_kv = viewed(extra.kv, DType::f32, {7, 512}); });
  rejected(
      "extra_kv: want shape [s_extra=2, 1, d_qk=512], got [2, 1, 576]",
      [](auto& args, auto& extra) { args.extra_kv = viewed(extra.kv, DType::f32, {2, 1, 576}); });
  rejected("extra_kv: want dtype f32, got f16", [](auto& args, auto& extra) {
    args.extra_kv = viewed(extra.kv, DType::f16, {7, 1, 512});
  });
  rejected("extra_kv: want at most 2^31 - 1 rows, the range of the indices, got 2147483648",
           [](auto& args, auto& extra) {
             args.extra_kv = ConstTensorView(extra.kv.data(), DType::f32,
                                             {std::int64_t{1} << 31, 1, 512}, {0, 512, 1});
           });
  rejected("extra_indices: want shape [s_q=2, 1, extra_topk=12], got [1, 1, 12]",
           [](auto& args, auto& extra) {
             args.extra_indices = viewed(extra.indices, DType::i32, {1, 1, 12});
           });
  rejected("extra_topk_length: want shape [s_q=2], got [1]", [](auto& args, auto& extra) {
    args.extra_topk_length = viewed(extra.length, DType::i32, {1});
  });
  rejected("extra_k_stride: want 1 where q_start is absent, got 3",
           [](auto& args, auto&) { args.extra_k_stride = 3; });
  rejected("extra_k_stride: want 1 or more, got 0", [](auto& args, auto&) {
    args.q_start = 0;
    args.extra_k_stride = 0;
  });
}

TEST(RejectsExtraOutputs, OfDistribution) {
  Extra extra;
  Tensor sums(DType::f32, {2, 6});
  const auto rejected = [&](bool with_source, const TensorView& output, const std::string& text) {
    refused<DistributionOp>(text, [&](auto& args, auto&) {
      if (with_source) extra.list(args);
      args.extra_attn_sum = output;
    });
  };
  rejected(true, {}, "extra_attn_sum: want a tensor, beside extra_kv, got none");
  rejected(false, sums, "extra_attn_sum: want extra_kv to be given as well, got no extra_kv");
  rejected(true, TensorView(sums.data(), DType::f32, {2, 4}),
           "extra_attn_sum: want shape [s_q=2, extra_topk=6], got [2, 4]");
}

TEST(RejectsExtraOutputs, OfBackward) {
  Extra extra;
  Tensor dextra_kv(DType::f32, {7, 1, 512});
  const auto rejected = [&](bool with_source, const TensorView& output, const std::string& text) {
    refused<BackwardOp>(text, [&](auto& args, auto&) {
      if (with_source) extra.range(args);
      args.dextra_kv = output;
    });
  };
  rejected(true, {}, "dextra_kv: want a tensor, beside extra_kv, got none");
  rejected(false, dextra_kv, "dextra_kv: want extra_kv to be given as well, got no extra_kv");
  rejected(true, TensorView(dextra_kv.data(), DType::bf16, {7, 1, 512}),
           "dextra_kv: want dtype f32, got bf16");
  rejected(true, TensorView(dextra_kv.data(), DType::f32, {5, 1, 512}),
           "dextra_kv: want shape [s_extra=7, 1, d_qk=512], got [5, 1, 512]");
}

// A range stands in the place of a list in backward, too.
TEST(RejectsBackward, AListBesideARange) {
  refused<BackwardOp>("key_end: want none, beside indices, got a tensor",
                      [](auto& args, auto& p) { args.key_end = p.topk_length; });
  refused<BackwardOp>("key_start: want a tensor [s_q], beside key_end, got none",
                      [](auto& args, auto& p) {
                        args.indices = args.topk_length = {};
                        args.key_end = p.topk_length;
                      });
}

// The kernels of GPUs read one source, which is a list in backward.
TEST(SourcesForGpus, MoreThanOneIsUnsupported) {
  const Check check("op");
  Extra extra;
  TestProblem problem;
  ForwardArgs args = ForwardOp::args(problem);
  check_one_source(check, Backend::sm90, problem_of(args));
  extra.list(args);
  for (const Backend backend : {Backend::sm90, Backend::sm100}) {
    expect_error([&] { check_one_source(check, backend, problem_of(args)); },
                 ErrorCode::unsupported,
                 "op: " + std::string(to_string(backend)) + ": want no extra_kv, got a tensor");
  }
}

}  // namespace
}  // namespace winnow::sparse_mla
