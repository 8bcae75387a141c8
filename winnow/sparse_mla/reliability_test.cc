// Reliability of the three sparse MLA operations alike: empty problems, far offsets, repeats,
// threads, forced backends, and that no output depends on what it held before.
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "winnow/sparse_mla/test_problem.h"
#include "winnow/testing/expect.h"
#include "winnow/testing/far_memory.h"

namespace winnow::sparse_mla {
namespace {

using winnow::testing::count_unwritten;
using winnow::testing::expect_all;
using winnow::testing::fill_unwritten;
using winnow::testing::same_bytes;

template <class Op>
class Reliability : public ::testing::Test {};
using Operations = ::testing::Types<ForwardOp, DistributionOp, BackwardOp>;
TYPED_TEST_SUITE(Reliability, Operations);

// Runs the operation on outputs that hold nothing but NaN and returns what it wrote.
template <class Op>
std::vector<Tensor> run_fresh(TestProblem& problem, const typename Op::Args& args) {
  for (Tensor* output : Op::outputs(problem)) fill_unwritten(*output);
  Op::run(args);
  std::vector<Tensor> copies;
  for (const Tensor* output : Op::outputs(problem)) {
    EXPECT_EQ(count_unwritten(output->view()), 0);
    copies.push_back(output->clone());
  }
  return copies;
}

// A problem in which threads share work and entries are invalid, repeated or hidden.
TestProblem uneven_problem(DType dtype) {
  TestProblem problem({.s_q = 37, .h_q = 20, .s_kv = 90, .topk = 70, .d_qk = 576, .dtype = dtype});
  std::int64_t n = 0;
  for (std::int32_t& index : problem.indices.values<std::int32_t>()) {
    if (++n % 7 == 0) index = -1;
  }
  auto lengths = problem.topk_length.values<std::int32_t>();
  for (std::size_t i = 0; i < lengths.size(); ++i) lengths[i] = static_cast<std::int32_t>(2 * i);
  return problem;
}

// out and lse of forward, for backward and distribution to work on.
void use_forward(TestProblem& problem) { ForwardOp::run(ForwardOp::args(problem)); }

TYPED_TEST(Reliability, ZeroSizesInEveryDimension) {
  for (int zeros = 1; zeros < 16; ++zeros) {
    Sizes sizes;
    if (zeros & 1) sizes.s_q = 0;
    if (zeros & 2) sizes.h_q = 0;
    if (zeros & 4) sizes.s_kv = 0;
    if (zeros & 8) sizes.topk = 0;
    SCOPED_TRACE("s_q " + std::to_string(sizes.s_q) + ", h_q " + std::to_string(sizes.h_q) +
                 ", s_kv " + std::to_string(sizes.s_kv) + ", topk " + std::to_string(sizes.topk));
    TestProblem problem(sizes);
    const typename TypeParam::Args args = TypeParam::args(problem);
    // One of the sizes is 0, so nothing is visible to anyone.
    run_fresh<TypeParam>(problem, args);
    for (Tensor* output : TypeParam::outputs(problem)) {
      const bool logarithm = output == &problem.lse || output == &problem.max_logits;
      expect_all(*output, logarithm ? -std::numeric_limits<double>::infinity() : 0.0);
    }
  }
}

TYPED_TEST(Reliability, TwentyRepeatsOnDirtyOutputs) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    TestProblem problem = uneven_problem(dtype);
    use_forward(problem);
    const typename TypeParam::Args args = TypeParam::args(problem);
    const std::vector<Tensor> first = run_fresh<TypeParam>(problem, args);
    for (int repeat = 1; repeat < 20; ++repeat) {
      const std::vector<Tensor> again = run_fresh<TypeParam>(problem, args);
      for (std::size_t n = 0; n < first.size(); ++n) {
        EXPECT_TRUE(same_bytes(first[n], again[n])) << "output " << n << ", repeat " << repeat;
      }
    }
  }
}

TYPED_TEST(Reliability, EightThreadsAtOnce) {
  TestProblem problem = uneven_problem(DType::f32);
  use_forward(problem);
  const std::vector<Tensor> expected = run_fresh<TypeParam>(problem, TypeParam::args(problem));
  std::vector<std::thread> threads;
  std::vector<int> different(8, 0);
  for (int& count : different) {
    threads.emplace_back([&expected, &count] {
      TestProblem own = uneven_problem(DType::f32);
      use_forward(own);
      for (int repeat = 0; repeat < 5; ++repeat) {
        for (Tensor* output : TypeParam::outputs(own)) fill_unwritten(*output);
        TypeParam::run(TypeParam::args(own));
        const std::vector<Tensor*> outputs = TypeParam::outputs(own);
        for (std::size_t n = 0; n < outputs.size(); ++n) {
          count += !same_bytes(*outputs[n], expected[n]);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const int count : different) EXPECT_EQ(count, 0);
}

TYPED_TEST(Reliability, ForcedBackend) {
  TestProblem problem;
  const typename TypeParam::Args args = TypeParam::args(problem);
  EXPECT_EQ(to_string(TypeParam::run(args, testing::forced(Backend::cpu))), "cpu");
  for (const Backend backend : {Backend::sm90, Backend::cuda}) {
    for (const bool by_environment : {false, true}) {
      const std::string name(to_string(backend));
      RunOptions options;
      if (by_environment) {
        setenv("WINNOW_BACKEND", name.c_str(), 1);
      } else {
        options.backend = backend;
      }
      for (Tensor* output : TypeParam::outputs(problem)) fill_unwritten(*output);
      try {
        TypeParam::run(args, options);
        ADD_FAILURE() << "ran on a machine or tensors that " << name << " cannot serve";
      } catch (const Error& error) {
        EXPECT_EQ(error.argument(), "backend");
        EXPECT_EQ(error.operation(), TypeParam::kName);
        EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << error.what();
      }
      unsetenv("WINNOW_BACKEND");
      for (Tensor* output : TypeParam::outputs(problem)) {
        EXPECT_EQ(count_unwritten(output->view()), output->numel());
      }
    }
  }
  setenv("WINNOW_BACKEND", "cpu", 1);
  EXPECT_EQ(to_string(TypeParam::run(args)), "cpu");
  setenv("WINNOW_BACKEND", "abacus", 1);
  testing::expect_error([&] { TypeParam::run(args); }, ErrorCode::invalid_argument,
                        std::string(TypeParam::kName) +
                            ": WINNOW_BACKEND: want one of sm100, sm90, cuda, cpu, got \"abacus\"");
  // What the call says counts more than the environment.
  EXPECT_EQ(to_string(TypeParam::run(args, testing::forced(Backend::cpu))), "cpu");
  unsetenv("WINNOW_BACKEND");
}

// A copy of a dense tensor in reserved memory, its first dimension far apart.
struct FarTensor {
  std::shared_ptr<void> memory;
  TensorView view;

  FarTensor(const Tensor& tensor, std::int64_t stride)
      : memory(testing::far_memory(
            static_cast<std::size_t>(tensor.size(0) * stride * size_of(tensor.dtype())))) {
    const ConstTensorView dense = tensor.view();
    std::vector<std::int64_t> strides(dense.strides().begin(), dense.strides().end());
    strides[0] = stride;
    if (memory == nullptr) return;
    view = TensorView(memory.get(), dense.dtype(), dense.shape(), strides);
    for (std::int64_t i = 0; i < view.size(0); ++i) copy_row(view, dense, i);
  }

  // Element (i, ...) of `from` to `to`; what lies below dimension 0 is dense.
  static void copy_row(const TensorView& to, const ConstTensorView& from, std::int64_t i) {
    const ConstTensorView row = from.slice(0, i, i + 1);
    std::memcpy(to.slice(0, i, i + 1).data(), row.data(),
                static_cast<std::size_t>(row.numel() * size_of(row.dtype())));
  }
};

// Offsets of more than 2^31 elements in the first dimension of every tensor: the same bits as the
// dense problem, at both ends.
TYPED_TEST(Reliability, OffsetsBeyond32Bits) {
  constexpr std::int64_t kFar = (std::int64_t{1} << 31) + 64;  // elements
  TestProblem problem({.s_q = 2, .h_q = 3, .s_kv = 3, .topk = 6, .d_qk = 576});
  use_forward(problem);
  const std::vector<Tensor> expected = run_fresh<TypeParam>(problem, TypeParam::args(problem));
  use_forward(problem);

  std::vector<std::unique_ptr<FarTensor>> far;
  typename TypeParam::Args args = TypeParam::args(problem);
  const auto move_away = [&](auto& view, const Tensor& tensor, bool output = false) {
    far.push_back(std::make_unique<FarTensor>(tensor, kFar));
    ASSERT_NE(far.back()->memory, nullptr) << "no address space";
    if (output) fill_unwritten(far.back()->view);
    view = far.back()->view;
  };
  move_away(args.q, problem.q);
  move_away(args.kv, problem.kv);
  move_away(args.indices, problem.indices);
  std::vector<TensorView> outputs;
  if constexpr (std::is_same_v<TypeParam, ForwardOp>) {
    move_away(args.out, problem.out, true);
    move_away(args.max_logits, problem.max_logits, true);
    move_away(args.lse, problem.lse, true);
    outputs = {args.out, args.max_logits, args.lse};
  } else if constexpr (std::is_same_v<TypeParam, DistributionOp>) {
    move_away(args.lse, problem.lse);
    move_away(args.attn_sum, problem.attn_sum, true);
    outputs = {args.attn_sum};
  } else {
    move_away(args.out, problem.out);
    move_away(args.lse, problem.lse);
    move_away(args.d_out, problem.d_out);
    move_away(args.dq, problem.dq, true);
    move_away(args.dkv, problem.dkv, true);
    outputs = {args.dq, args.dkv};
  }
  TypeParam::run(args);
  for (std::size_t n = 0; n < outputs.size(); ++n) {
    EXPECT_EQ(winnow::testing::read(outputs[n]), winnow::testing::read(expected[n].view()))
        << "output " << n;
  }
}

// More queries than a 16-bit grid dimension holds; every entry is visible to its query alone.
TEST(ForwardReliability, SeventyThousandQueries) {
  constexpr std::int64_t kQueries = 70000;
  Tensor q(DType::f32, {1, 1, 512}), kv(DType::f32, {7, 1, 512});
  Tensor indices(DType::i32, {kQueries, 1, 1}), out(DType::f32, {kQueries, 1, kValueDim});
  winnow::testing::Random random(3);
  winnow::testing::fill_normal(kv, random);
  winnow::testing::fill_below(indices, random, 7);
  fill_unwritten(out);
  forward({.q = ConstTensorView(q.data(), DType::f32, {kQueries, 1, 512}, {0, 512, 1}),
           .kv = kv,
           .indices = indices,
           .out = out});
  EXPECT_EQ(count_unwritten(out.view()), 0);
  std::int64_t different = 0;
  for (std::int64_t i = 0; i < kQueries; ++i) {
    const std::int64_t row = indices.view().at<std::int32_t>(i, 0, 0);
    different += std::memcmp(&out.view().at<float>(i, 0, 0), &kv.view().at<float>(row, 0, 0),
                             kValueDim * sizeof(float)) != 0;
  }
  EXPECT_EQ(different, 0);
}

TEST(BackwardReliability, ThreadsDoNotChangeTheResult) {
  TestProblem problem = uneven_problem(DType::f32);
  use_forward(problem);
  std::vector<Tensor> first;
  for (const int threads : {1, 2, 3, 5, 16}) {
    const testing::Threads number(threads);
    for (const bool deterministic : {false, true}) {
      BackwardArgs args = BackwardOp::args(problem);
      args.deterministic = deterministic;
      std::vector<Tensor> result = run_fresh<BackwardOp>(problem, args);
      if (first.empty()) first = std::move(result);
      for (std::size_t n = 0; n < result.size(); ++n) {
        EXPECT_TRUE(same_bytes(first[n], result[n])) << "output " << n << ", threads " << threads;
      }
    }
  }
}

}  // namespace
}  // namespace winnow::sparse_mla
