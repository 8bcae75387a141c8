// What all three sparse MLA operations refuse, with the text of the message, and that a refusal
// leaves outputs and library as they were.
#include <cstdint>
#include <functional>
#include <limits>

#include <gtest/gtest.h>

#include "winnow/core/check.h"
#include "winnow/sparse_mla/problem.h"
#include "winnow/sparse_mla/test_reject.h"

namespace winnow::sparse_mla {
namespace {

using winnow::testing::expect_error;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr std::int64_t kInt64Max = std::numeric_limits<std::int64_t>::max();

ConstTensorView misaligned(Tensor& tensor, std::int64_t bytes) {
  return {static_cast<char*>(tensor.data()) + bytes, tensor.dtype(), tensor.view().shape()};
}

template <class Op>
class Rejects : public ::testing::Test {};
using Operations = ::testing::Types<ForwardOp, DistributionOp, BackwardOp>;
TYPED_TEST_SUITE(Rejects, Operations);

TYPED_TEST(Rejects, MissingInputs) {
  refused<TypeParam>("q: want a tensor [s_q, h_q, d_qk], got none",
                     [](auto& args, auto&) { args.q = {}; });
  refused<TypeParam>("kv: want a tensor [s_kv, 1, d_qk], got none",
                     [](auto& args, auto&) { args.kv = {}; });
  refused<TypeParam>("indices: want a tensor [s_q, 1, topk], got none",
                     [](auto& args, auto&) { args.indices = {}; });
}

TYPED_TEST(Rejects, WrongRank) {
  refused<TypeParam>("q: want 3 dimensions [s_q, h_q, d_qk], got shape [6, 512]",
                     [](auto& args, auto& p) { args.q = viewed(p.q, DType::f32, {6, 512}); });
  refused<TypeParam>("kv: want 3 dimensions [s_kv, 1, d_qk], got shape [5, 512]",
                     [](auto& args, auto& p) { args.kv = viewed(p.kv, DType::f32, {5, 512}); });
  refused<TypeParam>(
      "indices: want 3 dimensions [s_q, 1, topk], got shape [8]",
      [](auto& args, auto& p) { args.indices = viewed(p.indices, DType::i32, {8}); });
}

TYPED_TEST(Rejects, FlatIndicesOfAnotherShape) {
  refused<TypeParam>("indices: want shape [s_q=2, topk=2], got [4, 2]", [](auto& args, auto& p) {
    args.indices = viewed(p.indices, DType::i32, {4, 2});
  });
}

template <class Op>
class RejectsRanges : public ::testing::Test {};
using DenseOperations = ::testing::Types<ForwardOp, DistributionOp>;
TYPED_TEST_SUITE(RejectsRanges, DenseOperations);

// topk_length, i32 [s_q], stands in for a range.
TYPED_TEST(RejectsRanges, AreInThePlaceOfIndices) {
  refused<TypeParam>("key_start: want none, beside indices, got a tensor",
                     [](auto& args, auto& p) { args.key_start = p.topk_length; });
  refused<TypeParam>("key_end: want none, beside indices, got a tensor",
                     [](auto& args, auto& p) { args.key_end = p.topk_length; });
  const auto dense = [](auto& args, auto& p) {
    args.indices = args.topk_length = {};
    args.key_start = args.key_end = p.topk_length;
  };
  refused<TypeParam>("key_start: want a tensor [s_q], beside key_end, got none",
                     [&](auto& args, auto& p) {
                       dense(args, p);
                       args.key_start = {};
                     });
  refused<TypeParam>("key_end: want a tensor [s_q], beside key_start, got none",
                     [&](auto& args, auto& p) {
                       dense(args, p);
                       args.key_end = {};
                     });
  refused<TypeParam>("topk_length: want none, without indices, got a tensor",
                     [&](auto& args, auto& p) {
                       dense(args, p);
                       args.topk_length = p.topk_length;
                     });
  refused<TypeParam>("key_end: want shape [s_q=2], got [1]", [&](auto& args, auto& p) {
    dense(args, p);
    args.key_end = viewed(p.topk_length, DType::i32, {1});
  });
  refused<TypeParam>("key_start: want dtype i32, got f32", [&](auto& args, auto& p) {
    dense(args, p);
    args.key_start = viewed(p.topk_length, DType::f32, {2});
  });
}

TYPED_TEST(Rejects, WrongShape) {
  refused<TypeParam>("q: want d_qk = 576 or 512, got d_qk = 64",
                     [](auto& args, auto& p) { args.q = viewed(p.q, DType::f32, {2, 3, 64}); });
  refused<TypeParam>("kv: want shape [s_kv=4, 1, d_qk=512], got [4, 1, 576]",
                     [](auto& args, auto& p) { args.kv = viewed(p.kv, DType::f32, {4, 1, 576}); });
  refused<TypeParam>("kv: want shape [s_kv=2, 1, d_qk=512], got [2, 2, 512]",
                     [](auto& args, auto& p) { args.kv = viewed(p.kv, DType::f32, {2, 2, 512}); });
  refused<TypeParam>(
      "indices: want shape [s_q=2, 1, topk=4], got [1, 1, 4]",
      [](auto& args, auto& p) { args.indices = viewed(p.indices, DType::i32, {1, 1, 4}); });
  refused<TypeParam>("topk_length: want shape [s_q=2], got [1]", [](auto& args, auto& p) {
    args.topk_length = viewed(p.topk_length, DType::i32, {1});
  });
  refused<TypeParam>("topk_length: want shape [s_q=2], got [2, 1]", [](auto& args, auto& p) {
    args.topk_length = viewed(p.topk_length, DType::i32, {2, 1});
  });
}

TYPED_TEST(Rejects, WrongDType) {
  refused<TypeParam>("q: want dtype f32 or f16 or bf16 or f64, got i32",
                     [](auto& args, auto& p) { args.q = viewed(p.q, DType::i32, {2, 3, 512}); });
  refused<TypeParam>(
      "q: want dtype f32 or f16 or bf16 or f64, got f8_e4m3",
      [](auto& args, auto& p) { args.q = viewed(p.q, DType::f8_e4m3, {2, 3, 512}); });
  refused<TypeParam>("kv: want dtype f32, got f16",
                     [](auto& args, auto& p) { args.kv = viewed(p.kv, DType::f16, {5, 1, 512}); });
  refused<TypeParam>("indices: want dtype i32, got i64", [](auto& args, auto& p) {
    args.indices = viewed(p.kv, DType::i64, {2, 1, 4});
  });
  refused<TypeParam>("topk_length: want dtype i32, got f32", [](auto& args, auto& p) {
    args.topk_length = viewed(p.topk_length, DType::f32, {2});
  });
}

// What f64 comes with is f64, and nothing else is.
TYPED_TEST(Rejects, F64BesideF32) {
  const Sizes f64{.dtype = DType::f64};
  refused<TypeParam>(
      "kv: want dtype f64, got f32",
      [](auto& args, auto& p) { args.kv = viewed(p.kv, DType::f32, {5, 1, 512}); }, f64);
  refused<TypeParam>(
      "lse: want dtype f64, got f32",
      [](auto& args, auto& p) { args.lse = viewed(p.lse, DType::f32, {2, 3}); }, f64);
  refused<TypeParam>("lse: want dtype f32, got f64",
                     [](auto& args, auto& p) { args.lse = viewed(p.out, DType::f64, {2, 3}); });
  refused<TypeParam>("lse: want dtype f32, got f64",
                     [](auto& args, auto& p) { args.lse = viewed(p.out, DType::f64, {2, 3}); },
                     {.dtype = DType::bf16});
}

TYPED_TEST(Rejects, WrongMemory) {
  refused<TypeParam>("q: want stride 1 in the last dimension, got strides [1024, 1024, 2]",
                     [](auto& args, auto& p) {
                       args.q =
                           ConstTensorView(p.q.data(), DType::f32, {2, 1, 512}, {1024, 1024, 2});
                     });
  refused<TypeParam>("q: want memory aligned to 4 bytes, got an address 1 bytes beyond",
                     [](auto& args, auto& p) { args.q = misaligned(p.q, 1); });
  refused<TypeParam>("kv: want memory aligned to 4 bytes, got an address 2 bytes beyond",
                     [](auto& args, auto& p) { args.kv = misaligned(p.kv, 2); });
  refused<TypeParam>("indices: want memory aligned to 4 bytes, got an address 2 bytes beyond",
                     [](auto& args, auto& p) { args.indices = misaligned(p.indices, 2); });
  const Device gpu{DeviceType::cuda, 1};
  refused<TypeParam>("kv: want device cpu, got cuda:1", [gpu](auto& args, auto& p) {
    args.kv = ConstTensorView(p.kv.data(), DType::f32, {5, 1, 512}, gpu);
  });
  refused<TypeParam>("topk_length: want device cpu, got cuda:1", [gpu](auto& args, auto& p) {
    args.topk_length = ConstTensorView(p.topk_length.data(), DType::i32, {2}, gpu);
  });
  refused<TypeParam>("kv: want at most 2^31 - 1 rows, the range of the indices, got 2147483648",
                     [](auto& args, auto& p) {
                       args.kv = ConstTensorView(p.kv.data(), DType::f32,
                                                 {std::int64_t{1} << 31, 1, 512}, {0, 512, 1});
                     });
}

TYPED_TEST(Rejects, WrongNumbers) {
  refused<TypeParam>("scale: want a finite number, got inf",
                     [](auto& args, auto&) { args.scale = kInf; });
  refused<TypeParam>("scale: want a finite number, got -inf",
                     [](auto& args, auto&) { args.scale = -kInf; });
  refused<TypeParam>("scale: want a finite number, got nan", [](auto& args, auto&) {
    args.scale = std::numeric_limits<double>::quiet_NaN();
  });
  refused<TypeParam>("k_stride: want 1 where q_start is absent, got 3",
                     [](auto& args, auto&) { args.k_stride = 3; });
  for (const std::int64_t k_stride : {std::int64_t{0}, std::int64_t{-1}, -kInt64Max}) {
    refused<TypeParam>("k_stride: want 1 or more, got " + std::to_string(k_stride),
                       [k_stride](auto& args, auto&) {
                         args.q_start = 0;
                         args.k_stride = k_stride;
                       });
  }
  const std::string wanted = "q_start: want positions from -2^62 to 2^62 - 1, got ";
  refused<TypeParam>(wanted + "9223372036854775807",
                     [](auto& args, auto&) { args.q_start = kInt64Max; });
  refused<TypeParam>(wanted + "4611686018427387903 to 4611686018427387904",
                     [](auto& args, auto&) { args.q_start = (std::int64_t{1} << 62) - 1; });
}

template <class Args, class Function>
void for_each_tensor(Args& args, const Function& function) {
  function(args.q), function(args.kv), function(args.indices), function(args.topk_length);
  function(args.lse);
  if constexpr (requires { args.attn_sink; }) function(args.attn_sink);
  if constexpr (requires { args.out; }) function(args.out);
  if constexpr (requires { args.max_logits; }) function(args.max_logits);
  if constexpr (requires { args.attn_sum; }) function(args.attn_sum);
  if constexpr (requires { args.dq; }) {
    function(args.d_out), function(args.dq), function(args.dkv), function(args.d_sink);
  }
}

TYPED_TEST(Rejects, ADryRunTouchesNoMemory) {
  TestProblem problem;
  typename TypeParam::Args args = TypeParam::args(problem);
  for_each_tensor(args, [](auto& view) { view = testing::without_memory(view); });
  EXPECT_EQ(TypeParam::run(args, {.dry_run = true}), Backend::cpu);
}

Problem of_sizes(std::int64_t s_q, std::int64_t h_q, std::int64_t topk) {
  Problem problem;
  problem.s_q = s_q;
  problem.h_q = h_q;
  problem.topk = topk;
  return problem;
}

// What the sm90 kernels count in 32 bits. gpu_test asks the operations themselves.
TEST(SizesForSm90, UpToTwoToTheThirty) {
  constexpr std::int64_t kLimit = std::int64_t{1} << 30;
  const Check check("op");
  check_sizes_for_gpu(check, Backend::sm90, of_sizes(kLimit / 128, 128, kLimit));
  check_sizes_for_gpu(check, Backend::sm90, of_sizes(1, kLimit, 0));
  check_sizes_for_gpu(check, Backend::sm90, of_sizes(kLimit, 0, 0));
  const auto refused = [&](const Problem& problem, const std::string& sizes) {
    expect_error([&] { check_sizes_for_gpu(check, Backend::sm90, problem); },
                 ErrorCode::unsupported,
                 "op: sm90: want topk and s_q * h_q up to 2^30, got " + sizes);
  };
  refused(of_sizes(0, 0, kLimit + 1), "topk 1073741825, s_q 0, h_q 0");
  refused(of_sizes(kLimit / 128 + 1, 128, 0), "topk 0, s_q 8388609, h_q 128");
  refused(of_sizes(kLimit + 1, 0, 0), "topk 0, s_q 1073741825, h_q 0");
  refused(of_sizes(0, kLimit + 1, 0), "topk 0, s_q 0, h_q 1073741825");
  refused(of_sizes(kInt64Max, kInt64Max, 0),
          "topk 0, s_q 9223372036854775807, h_q 9223372036854775807");
  const char row = 0;
  Problem two = of_sizes(1, 1, kLimit - 5);
  two.extra.kv.data = &row;
  two.extra.topk = 5;
  check_sizes_for_gpu(check, Backend::sm90, two);
  two.extra.topk = 6;
  expect_error([&] { check_sizes_for_gpu(check, Backend::sm90, two); }, ErrorCode::unsupported,
               "op: sm90: want topk + extra_topk and s_q * h_q up to 2^30, got topk 1073741819, "
               "extra_topk 6, s_q 1, h_q 1");
}

// The CPU has no kernels for tensors on a GPU, and a GPU address must not be touched.
TYPED_TEST(Rejects, TensorsOnAGpuWithoutKernels) {
  if (!gpus().gpus.empty()) GTEST_SKIP() << "has a GPU";
  TestProblem problem;
  typename TypeParam::Args args = TypeParam::args(problem);
  for_each_tensor(args, [](auto& view) {
    using View = std::remove_reference_t<decltype(view)>;
    if (!view.present()) return;
    // bf16, which a GPU backend takes, for what has the columns of rows.
    const bool rows = view.rank() == 3 && view.size(2) >= kValueDim;
    view = View(view.data(), rows ? DType::bf16 : view.dtype(), view.shape(), view.strides(),
                {DeviceType::cuda, 0});
  });
  try {
    TypeParam::run(args);
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(int(error.code()), int(ErrorCode::unsupported));
    EXPECT_EQ(error.argument(), "backend");
    EXPECT_NE(std::string(error.what()).find("tensors on cuda:0"), std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace winnow::sparse_mla
