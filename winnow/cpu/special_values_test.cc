// Infinity and NaN among the logits and sinks: every module of the CPU backend gives what the
// formulas say, element by element.
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "winnow/core/executor.h"
#include "winnow/cpu/kernels.h"
#include "winnow/cpu/test_modules.h"
#include "winnow/paged_xl/attention/attention_impl.h"
#include "winnow/paged_xl/attention/attention_oracle.h"
#include "winnow/paged_xl/cases.h"
#include "winnow/sparse_mla/backward/backward_impl.h"
#include "winnow/sparse_mla/backward/backward_oracle.h"
#include "winnow/sparse_mla/cases.h"
#include "winnow/sparse_mla/distribution/distribution_impl.h"
#include "winnow/sparse_mla/distribution/distribution_oracle.h"
#include "winnow/sparse_mla/forward/forward_impl.h"
#include "winnow/sparse_mla/test_problem.h"
#include "winnow/testing/expect.h"

namespace winnow {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// The same numbers in f64.
Tensor widened(const Tensor& tensor) {
  Tensor result(DType::f64, tensor.view().shape());
  const std::vector<double> values = testing::read(tensor.view());
  std::copy(values.begin(), values.end(), result.values<double>().begin());
  return result;
}

// One query for each way in which its logits are special. All elements of q are positive, so that
// an infinite element of a row makes the logit infinite. Every query has ordinary rows of its own;
// each sees more rows than a kernel takes at once.
struct SpecialProblem {
  // Special rows: the place of their special element, and what it is. The last 64 columns are no
  // value, so that there the weight alone is special.
  enum Row : std::int32_t { low, high, nan, low_value, high_value, steep, kRows };
  static constexpr std::int64_t kTopk = 200, kLate = 195;  // kLate: in the second block
  static constexpr std::int64_t kQueries = 15, kHiddenQuery = 11;

  sparse_mla::TestProblem tensors;
  sparse_mla::Problem problem;

  explicit SpecialProblem(const std::vector<float>& sinks, DType dtype = DType::f32)
      : tensors({.s_q = kQueries,
                 .h_q = static_cast<std::int64_t>(sinks.size()),
                 .s_kv = kRows + kQueries * kTopk,
                 .topk = kTopk,
                 .d_qk = 576}) {
    for (float& value : tensors.q.values<float>()) value = 0.1f + std::abs(value);
    std::copy(sinks.begin(), sinks.end(), tensors.attn_sink.values<float>().begin());
    const auto kv = [&](Row row, std::int64_t column) -> float& {
      return tensors.kv.view().at<float>(std::int64_t{row}, 0, column);
    };
    kv(low, 575) = -kInf;
    kv(high, 575) = kInf;
    kv(nan, 575) = kNaN;
    kv(low_value, 0) = -kInf;
    kv(high_value, 0) = kInf;
    // A logit of about 150 or 900: the other weights underflow.
    kv(steep, 575) = (dtype == DType::f64 ? 900 : 150) * 24;
    for (std::int64_t i = 0; i < kQueries; ++i) {
      for (std::int64_t h = 0; h < tensors.q.size(1); ++h) {
        tensors.q.view().at<float>(i, h, 575) = 1;
      }
    }
    for (std::int64_t i = 0; i < kQueries; ++i) {
      for (std::int64_t j = 0; j < kTopk; ++j) {
        index(i, j) = static_cast<std::int32_t>(kRows + i * kTopk + j);
      }
    }
    index(0, 0) = low;
    index(1, kLate) = low;
    for (std::int64_t j = 0; j < kTopk; ++j) index(2, j) = low;
    for (std::int64_t j = 0; j < kLate; ++j) index(3, j) = low;
    index(4, 0) = high;
    index(5, kLate) = high;
    index(6, 0) = nan;
    index(7, kLate) = nan;
    index(8, 0) = high;
    index(8, kLate) = nan;
    index(9, 0) = low_value;
    index(10, 0) = high_value;
    for (std::int64_t j = 0; j < kTopk; ++j) index(kHiddenQuery, j) = -1;
    for (std::int64_t j = 0; j < kTopk; ++j) index(12, j) = low_value;
    for (std::int64_t j = 0; j < kLate; ++j) index(13, j) = low;
    index(13, kLate) = nan;
    index(14, 3) = steep;

    if (dtype == DType::f64) {
      sparse_mla::TestProblem& t = tensors;
      for (Tensor* tensor : {&t.q, &t.kv, &t.attn_sink, &t.d_out, &t.delta, &t.out, &t.max_logits,
                             &t.lse, &t.attn_sum, &t.dq, &t.dkv, &t.d_sink}) {
        *tensor = widened(*tensor);
      }
    }
    problem.dtype = dtype;
    problem.s_q = kQueries;
    problem.h_q = static_cast<std::int64_t>(sinks.size());
    problem.s_kv = tensors.kv.size(0);
    problem.d_qk = 576;
    problem.topk = kTopk;
    problem.scale = round_to_accumulator(dtype, oracle_inputs().logit_scale());
    problem.q = rows_of<const void*>(tensors.q.view(), 0, 1);
    problem.kv = rows_of<const void*>(tensors.kv.view(), 0);
    problem.indices = rows_of<const std::int32_t*>(tensors.indices.view(), 0);
  }

  std::int32_t& index(std::int64_t i, std::int64_t j) {
    return tensors.indices.view().at<std::int32_t>(i, 0, j);
  }
  sparse_mla::oracle::Inputs oracle_inputs() const {
    return {{.kv = tensors.kv, .indices = tensors.indices}, tensors.q, tensors.attn_sink};
  }
  std::vector<std::int64_t> queries() const {
    std::vector<std::int64_t> all;
    for (std::int64_t i = 0; i < kQueries; ++i) all.push_back(i);
    return all;
  }
  // The lse of the formula, for distribution and backward.
  void use_lse() {
    const auto expected = sparse_mla::oracle::forward(oracle_inputs(), queries());
    for (std::int64_t n = 0; n < tensors.lse.numel(); ++n) {
      const std::int64_t i = n / problem.h_q, h = n % problem.h_q;
      testing::fill(tensors.lse.view().slice(0, i, i + 1).slice(1, h, h + 1),
                    expected.lse[static_cast<std::size_t>(n)]);
    }
  }
};

// Sinks of every kind; NaN on its own, because in backward it reaches every row.
const std::vector<std::vector<float>> kSinks = {{0.5f, -kInf, kInf}, {kNaN, 0.25f}};

void expect_close(const char* what, const Tensor& actual, const std::vector<double>& expected,
                  sparse_mla::Quantity quantity, double largest_logit) {
  testing::expect_passed(testing::compare(
      what, actual, expected,
      tolerance(quantity, sparse_mla::CaseShape{.name = "", .dtype = actual.dtype()},
                largest_logit)));
}

using sparse_mla::Quantity;
using sparse_mla::oracle::element;

class SpecialValues : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(In, SpecialValues, ::testing::Values(DType::f32, DType::f64),
                         [](const auto& one) { return std::string(to_string(one.param)); });

TEST_P(SpecialValues, Forward) {
  for (const std::vector<float>& sinks : kSinks) {
    SpecialProblem special(sinks, GetParam());
    sparse_mla::TestProblem& t = special.tensors;
    const auto expected = sparse_mla::oracle::forward(special.oracle_inputs(), special.queries());
    for_each_module([&](const CpuKernels& kernels) {
      sparse_mla::ForwardParams params;
      params.problem = special.problem;
      params.attn_sink = rows_of<const void*>(t.attn_sink.view(), 0);
      params.out = rows_of<void*>(t.out.view(), 0, 1);
      params.max_logits = rows_of<void*>(t.max_logits.view(), 0);
      params.lse = rows_of<void*>(t.lse.view(), 0);
      kernels.sparse_mla_forward(params, ThreadExecutor());
      expect_close("out", t.out, expected.out, Quantity::out, expected.largest_logit);
      expect_close("lse", t.lse, expected.lse, Quantity::lse, expected.largest_logit);
      expect_close("max_logits", t.max_logits, expected.max_logits, Quantity::max_logits,
                   expected.largest_logit);
    });
    // The oracle itself says what the page says.
    const auto h_q = static_cast<std::size_t>(special.problem.h_q);
    EXPECT_EQ(expected.lse[2 * h_q], -kInf);
    EXPECT_EQ(expected.lse[4 * h_q], kInf);
    EXPECT_EQ(expected.max_logits[5 * h_q], kInf);
    EXPECT_TRUE(std::isnan(expected.lse[6 * h_q]));
    EXPECT_TRUE(std::isnan(expected.max_logits[8 * h_q]));
    EXPECT_EQ(expected.out[2 * h_q * 512], 0);
  }
}

TEST_P(SpecialValues, Distribution) {
  SpecialProblem special({0.0f, 0.0f}, GetParam());
  special.use_lse();
  sparse_mla::TestProblem& t = special.tensors;
  const auto expected =
      sparse_mla::oracle::distribution(special.oracle_inputs(), t.lse, special.queries());
  for_each_module([&](const CpuKernels& kernels) {
    sparse_mla::DistributionParams params;
    params.problem = special.problem;
    params.lse = rows_of<const void*>(t.lse.view(), 0);
    params.attn_sum = rows_of<void*>(t.attn_sum.view(), 0);
    kernels.sparse_mla_distribution(params, ThreadExecutor());
    expect_close("attn_sum", t.attn_sum, expected.attn_sum, Quantity::attn_sum,
                 expected.largest_logit);
    EXPECT_EQ(element(t.attn_sum, 0, 0), 0);  // of a logit of -inf, not next to 0
    EXPECT_EQ(element(t.attn_sum, 4, 1), 0);  // beside one of inf
    EXPECT_EQ(element(t.attn_sum, 14, 0), 0);
  });
}

TEST_P(SpecialValues, DistributionOverflowsToInfinity) {
  SpecialProblem special({0.0f}, GetParam());
  sparse_mla::TestProblem& t = special.tensors;
  testing::fill(t.lse, -2000);  // exp(2000) is beyond f64
  for_each_module([&](const CpuKernels& kernels) {
    sparse_mla::DistributionParams params;
    params.problem = special.problem;
    params.lse = rows_of<const void*>(t.lse.view(), 0);
    params.attn_sum = rows_of<void*>(t.attn_sum.view(), 0);
    kernels.sparse_mla_distribution(params, ThreadExecutor());
    EXPECT_EQ(element(t.attn_sum, 0, 1), kInf);
    EXPECT_EQ(element(t.attn_sum, 0, 0), 0);
  });
}

TEST_P(SpecialValues, Backward) {
  for (const std::vector<float>& sinks : kSinks) {
    SpecialProblem special(sinks, GetParam());
    special.use_lse();
    sparse_mla::TestProblem& t = special.tensors;
    std::vector<std::int64_t> rows;
    for (std::int64_t row = 0; row < special.problem.s_kv; ++row) rows.push_back(row);
    const auto expected = sparse_mla::oracle::backward(
        special.oracle_inputs(), {.out = t.out, .lse = t.lse, .d_out = t.d_out, .delta = t.delta},
        special.queries(), rows);
    for_each_module([&](const CpuKernels& kernels) {
      sparse_mla::BackwardParams params;
      params.problem = special.problem;
      params.attn_sink = rows_of<const void*>(t.attn_sink.view(), 0);
      params.lse = rows_of<const void*>(t.lse.view(), 0);
      params.delta = rows_of<const void*>(t.delta.view(), 0);
      params.d_out = rows_of<const void*>(t.d_out.view(), 0, 1);
      params.dq = rows_of<void*>(t.dq.view(), 0, 1);
      params.dq_dtype = t.dq.dtype();
      params.dkv = rows_of<void*>(t.dkv.view(), 0);
      params.dkv_dtype = t.dkv.dtype();
      params.d_sink = rows_of<void*>(t.d_sink.view(), 0);
      kernels.sparse_mla_backward(params, ThreadExecutor());
      expect_close("dq", t.dq, expected.dq, Quantity::dq, expected.largest_logit);
      expect_close("dkv", t.dkv, expected.dkv, Quantity::dkv, expected.largest_logit);
      expect_close("d_sink", t.d_sink, expected.d_sink, Quantity::d_sink, expected.largest_logit);
    });
  }
}

TEST_P(SpecialValues, PagedAttention) {
  using namespace paged_xl;
  const DType dtype = GetParam();
  const Step step = make_step({.name = "special",
                               .dtype = dtype,
                               .context_lens = {40, 40, 40, 40, 600, 600, 600, 600, 40, 40, 0}});
  const AttentionArgs args = step.attention_args();
  const std::int64_t heads = args.query.size(1);
  const auto set = [&](std::int64_t s, std::int64_t begin, std::int64_t end, float value) {
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t j = begin; j < end; ++j) {
        testing::fill(step.matrix_bd.view.slice(0, s, s + 1).slice(1, h, h + 1).slice(2, j, j + 1),
                      value);
      }
    }
  };
  const auto set_value = [&](std::int64_t s, float value) {  // of token 0
    for (std::int64_t h = 0; h < args.value_cache.size(1); ++h) {
      const std::int64_t block = step.block_tables.view().at<std::int32_t>(s, 0);
      const TensorView& values = step.value_cache.view;
      testing::fill(
          values.slice(0, block, block + 1).slice(1, h, h + 1).slice(2, 0, 1).slice(3, 0, 1),
          value);
    }
  };
  set(0, 0, 1, -kInf);
  set(1, 3, 4, kInf);
  set(2, 3, 4, kNaN);
  set(3, 0, 40, -kInf);
  set(4, 0, 512, -kInf);  // the first split
  set(5, 520, 521, kInf);
  set(6, 520, 521, kNaN);
  set(7, 0, 1, kInf);
  set(7, 520, 521, kNaN);
  set(8, 0, 1, -kInf);
  set_value(8, kInf);  // 0 * inf
  set(9, 0, 40, -kInf);
  set_value(9, kInf);
  const oracle::Attention expected = oracle::attention(args);
  EXPECT_EQ(expected.lse[static_cast<std::size_t>(1 * heads)], kInf);
  EXPECT_TRUE(std::isnan(expected.lse[static_cast<std::size_t>(7 * heads)]));
  EXPECT_EQ(expected.lse[static_cast<std::size_t>(9 * heads)], -kInf);

  for_each_module([&](const CpuKernels& kernels) {
    Tensor out(dtype, args.query.shape()), lse(accumulator_of(dtype), {args.query.size(0), heads});
    AttentionParams params = attention_params(args, out);
    params.lse = rows_of<void*>(lse.view(), 0);
    kernels.paged_xl_attention(params, ThreadExecutor());
    testing::expect_passed(
        testing::compare("out", out, expected.out,
                         tolerance(paged_xl::Quantity::out, dtype, expected.largest_logit)));
    testing::expect_passed(
        testing::compare("lse", lse, expected.lse,
                         tolerance(paged_xl::Quantity::lse, lse.dtype(), expected.largest_logit)));
  });
}

}  // namespace
}  // namespace winnow
