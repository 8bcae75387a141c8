// The sums of combine, of every instruction set: the same bits as plain loops.
#include "winnow/expert_parallel/combine/combine_row_sum.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "winnow/core/tensor.h"
#include "winnow/cpu/kernels.h"
#include "winnow/testing/generate.h"

namespace winnow::expert_parallel {
namespace {

template <class T>
class RowSums : public ::testing::Test {};
using Types = ::testing::Types<float, Half, BFloat16>;
TYPED_TEST_SUITE(RowSums, Types);

// Nodes of ranks of rows: {{2}, {1, 3}} is a node with 2 rows of one rank and one with 1 and 3.
using Groups = std::vector<std::vector<int>>;

template <class T>
struct Problem {
  std::int64_t hidden = 0;
  Tensor rows, biases;
  std::vector<Addend> addends;

  Problem(const Groups& groups, std::int64_t columns, bool round, std::uint64_t seed)
      : hidden(columns) {
    int count = 0;
    for (const auto& node : groups) {
      for (const int rank : node) count += rank;
    }
    testing::Random random(seed);
    rows = Tensor(dtype_of<T>, {count, hidden});
    biases = Tensor(dtype_of<T>, {2, hidden});
    testing::fill_normal(rows.view(), random);
    testing::fill_normal(biases.view(), random);
    for (const auto& node : groups) {
      for (const int rank : node) {
        for (int i = 0; i < rank; ++i) {
          const auto row = static_cast<std::int64_t>(addends.size());
          addends.push_back({.row = rows.values<T>().data() + row * hidden,
                             .weight = 0.1f + 0.37f * float(row),
                             .round_rank = round});
        }
        addends.back().ends_rank = true;
      }
      addends.back().ends_node = true;
    }
  }

  const T* bias(int i) const { return biases.values<T>().data() + i * hidden; }

  std::vector<T> expected(bool weighted, int bias_count) const {
    std::vector<T> sums;
    for (std::int64_t c = 0; c < hidden; ++c) {
      float total = 0, node = 0, rank = 0;
      for (const Addend& addend : addends) {
        const float value = float(static_cast<const T*>(addend.row)[c]);
        // Exact in double precision, so that no compiler can fuse product and sum.
        rank += weighted ? float(double(value) * double(addend.weight)) : value;
        if (!addend.ends_rank) continue;
        node += addend.round_rank ? float(T(rank)) : rank;
        rank = 0;
        if (!addend.ends_node) continue;
        total += node;
        node = 0;
      }
      for (int i = 0; i < bias_count; ++i) total += float(bias(i)[c]);
      sums.push_back(T(total));
    }
    return sums;
  }

  std::vector<T> sum(const CpuKernels& kernels, bool weighted, int bias_count) const {
    std::vector<T> sums(static_cast<std::size_t>(hidden) + 1);
    std::memset(static_cast<void*>(&sums.back()), 0x5a, sizeof(T));
    const T guard = sums.back();
    kernels.expert_parallel_sum_rows({.dtype = dtype_of<T>,
                                      .hidden = hidden,
                                      .addends = addends.data(),
                                      .count = int(addends.size()),
                                      .weighted = weighted,
                                      .bias = bias_count > 0 ? bias(0) : nullptr,
                                      .second_bias = bias_count > 1 ? bias(1) : nullptr,
                                      .to = sums.data()});
    EXPECT_EQ(std::memcmp(&guard, &sums.back(), sizeof(T)), 0) << "wrote behind the row";
    sums.pop_back();
    return sums;
  }
};

TYPED_TEST(RowSums, AreThoseOfPlainLoops) {
  const std::vector<Groups> all = {{},       {{1}},         {{3}},
                                   {{1, 2}}, {{2}, {1, 3}}, {{1, 1}, {1}, {8, 2}}};
  for (const CpuModule& module : cpu_modules()) {
    if (!module.runs_here) continue;
    for (const std::int64_t hidden : {8, 16, 64, 72, 200}) {
      for (std::size_t i = 0; i < all.size(); ++i) {
        for (int options = 0; options < 12; ++options) {
          SCOPED_TRACE(std::string(module.kernels->name) + ", hidden " + std::to_string(hidden) +
                       ", groups " + std::to_string(i) + ", options " + std::to_string(options));
          const bool weighted = options & 1, round = options & 2;
          const int bias_count = options / 4;
          const Problem<TypeParam> problem(all[i], hidden, round, i + 1);
          const auto expected = problem.expected(weighted, bias_count);
          const auto actual = problem.sum(*module.kernels, weighted, bias_count);
          ASSERT_EQ(
              std::memcmp(actual.data(), expected.data(), expected.size() * sizeof(TypeParam)), 0);
        }
      }
    }
  }
}

// Infinities of both signs give NaN; a NaN stays one; a lone -0 becomes +0.
TYPED_TEST(RowSums, SpecialValues) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (const CpuModule& module : cpu_modules()) {
    if (!module.runs_here) continue;
    SCOPED_TRACE(module.kernels->name);
    Problem<TypeParam> problem({{2}}, 16, false, 1);
    const auto set = [&](std::int64_t column, float first, float second) {
      problem.rows.template values<TypeParam>()[std::size_t(column)] = TypeParam(first);
      problem.rows.template values<TypeParam>()[std::size_t(16 + column)] = TypeParam(second);
    };
    set(0, kInf, -kInf);
    set(1, kNan, 1);
    set(2, -0.0f, -0.0f);
    set(3, kInf, 1);
    const auto sums = problem.sum(*module.kernels, false, 0);
    EXPECT_TRUE(std::isnan(float(sums[0])));
    EXPECT_TRUE(std::isnan(float(sums[1])));
    EXPECT_FALSE(std::signbit(float(sums[2])));
    EXPECT_EQ(float(sums[3]), kInf);
  }
}

}  // namespace
}  // namespace winnow::expert_parallel
