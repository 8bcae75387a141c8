// The kernels of the deterministic mode of sparse_mla::backward without the whole call, which would
// have to be too large: rows that keep or change their scale between chunks of queries, and sums at
// their limits. The test makes the additions itself. Also tested: the bounds kernel, which runs
// before the fused kernel, and one whole call of two chunks.
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include "winnow/core/tensor.h"
#include "winnow/sparse_mla/backward/backward.h"
#include "winnow/sparse_mla/backward/backward_bounds_sm90.cuh"
#include "winnow/sparse_mla/backward/backward_split_launch.cuh"

namespace winnow::sparse_mla::backward_split_detail {
namespace {

constexpr Runtime kTestRuntime{"test", "sm90"};
constexpr int kColumns = 512;
constexpr Device kGpu{DeviceType::cuda, 0};

// Rows of dkv, to which `groups` groups of heads add.
class FixedRows {
 public:
  explicit FixedRows(std::int64_t rows, int groups = 1)
      : rows_(rows),
        dkv_(zeros(DType::f32, rows * kColumns)),
        fixed_(zeros(DType::f32, rows * kColumns)),
        states_(zeros(DType::u8, rows * static_cast<std::int64_t>(sizeof(RowState)))),
        bounds_(zeros(DType::i32, rows)),
        counts_(zeros(DType::i32, rows)) {
    params_.blocks = 2 * groups;
    params_.columns = kColumns;
    params_.dkv = static_cast<float*>(dkv_.data());
    params_.dkv_stride = kColumns;
    params_.fixed = static_cast<unsigned long long*>(fixed_.data());
    params_.row_states = static_cast<RowState*>(states_.data());
    params_.row_bounds = static_cast<unsigned*>(bounds_.data());
    params_.row_counts = static_cast<unsigned*>(counts_.data());
  }

  // Sets what the bounds kernel would leave for a chunk of queries: the row's largest bound and its
  // number of entries.
  void choose(std::int64_t row, float bound, unsigned entries) {
    params_.row_bounds[row] = std::bit_cast<unsigned>(bound);
    params_.row_counts[row] = entries;
  }
  void settle() { run(settle_kernel); }
  float scale(std::int64_t row) const { return params_.row_states[row].scale; }
  // Adds value(column) to each column `times` times, rounded and packed as FixedDrain does.
  void add(std::int64_t row, std::uint64_t times, const std::function<float(int)>& value) {
    for (int column = 0; column < kColumns; column += 2) {
      const auto word = [&](int c) {
        return std::uint64_t{__float_as_uint(fmaf(value(c), scale(row), kRounder))};
      };
      params_.fixed[(row * kColumns + column) / 2] +=
          times * (word(column + 1) << 32 | word(column));
    }
  }
  void fold() { run(fold_kernel); }
  float result(std::int64_t row, int column) const { return params_.dkv[row * kColumns + column]; }

 private:
  void run(void (*kernel)(Params, std::int64_t)) {
    launch_rows(kTestRuntime, kernel, params_, rows_, nullptr);
    kTestRuntime.check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  static Tensor zeros(DType dtype, std::int64_t n) { return Tensor(dtype, {n}).to(kGpu); }

  std::int64_t rows_;
  Tensor dkv_, fixed_, states_, bounds_, counts_;
  Params params_{};
};

TEST(SmallestSimulatorBackwardFixed, KeepsTheScaleWhileThereIsRoom) {
  FixedRows rows(11);
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<std::vector<double>> expected(11, std::vector<double>(kColumns));
  double magnitude = 0;
  int kept = 0, lost = 0;
  for (const float size : {1.0f, 1.0f, 1.5f, 1e3f, 1e-3f, 40.0f}) {
    for (int row = 0; row < 10; ++row) rows.choose(row, 8 * size, 3);
    const float before = rows.scale(4);
    rows.settle();
    (rows.scale(4) == before ? kept : lost) += 1;
    magnitude = std::max<double>(magnitude, size);
    for (int row = 0; row < 10; ++row) {
      for (int entry = 0; entry < 3; ++entry) {
        std::vector<float> values(kColumns);
        for (float& value : values) value = std::clamp(normal(random), -8.0f, 8.0f) * size;
        rows.add(row, 1, [&](int column) { return values[static_cast<std::size_t>(column)]; });
        for (std::size_t c = 0; c < values.size(); ++c) expected[std::size_t(row)][c] += values[c];
      }
    }
  }
  rows.fold();
  EXPECT_EQ(kept, 4);
  EXPECT_EQ(lost, 2);  // the first, and 1e3
  for (int row = 0; row < 11; ++row) {
    for (int column = 0; column < kColumns; ++column) {
      ASSERT_NEAR(rows.result(row, column), expected[std::size_t(row)][std::size_t(column)],
                  2e-5 * magnitude)
          << row << " " << column;
    }
  }
}

// All addends as large as they may be, of one sign: no sum leaves its half of a word.
TEST(SmallestSimulatorBackwardFixed, SumsOfTheLargestAddendsFit) {
  for (const int groups : {1, 3}) {
    for (const unsigned entries : {1u, 100u, 1000u, 1u << 22}) {
      FixedRows rows(1, groups);
      constexpr float kBound = 3.3f;
      double sum = 0;
      for (int chunk = 0; chunk < 20; ++chunk) {
        rows.choose(0, kBound, entries);
        rows.settle();
        const std::uint64_t addends = std::uint64_t{entries} * static_cast<unsigned>(groups);
        // Even columns are negative, odd ones positive: the low half borrows from the high half.
        rows.add(0, addends, [&](int column) { return column % 2 == 0 ? -kBound : kBound; });
        sum += static_cast<double>(addends) * kBound;
      }
      rows.fold();
      for (const int column : {0, 1, 510, 511}) {
        EXPECT_NEAR(rows.result(0, column), column % 2 == 0 ? -sum : sum,
                    entries > 1000 ? 0.03 * sum : 1e-5 * sum)
            << entries << " entries, " << groups << " groups";
      }
    }
  }
}

TEST(SmallestSimulatorBackwardFixed, NothingIsLostBehindSmallerAddends) {
  for (const auto& [first, then] : {std::pair{0.0f, 1e-20f}, {1.0f, 7.0f}}) {
    FixedRows rows(1);
    for (const float value : {first, -then}) {
      rows.choose(0, std::fabs(value), 2);
      rows.settle();
      rows.add(0, 2, [value](int) { return value; });
    }
    rows.fold();
    EXPECT_NEAR(rows.result(0, 7), 2 * (first - then), 1e-5 * then);
  }
}

TEST(SmallestSimulatorBackwardFixed, ValuesThatAreNotFiniteStay) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  FixedRows rows(2);
  rows.choose(0, kNan, 1);
  rows.choose(1, 1, 1);
  rows.settle();
  rows.add(0, 1, [](int) { return kNan; });
  rows.add(1, 1, [](int) { return 0.5f; });
  for (int row = 0; row < 2; ++row) rows.choose(row, 1, 1);
  rows.settle();
  for (int row = 0; row < 2; ++row) rows.add(row, 1, [](int) { return 0.25f; });
  rows.fold();
  EXPECT_TRUE(std::isnan(rows.result(0, 3)));
  EXPECT_EQ(rows.result(1, 3), 0.75f);
}

// The formula of backward_bounds_sm90.cuh in double, for queries of sizes far apart: what the
// kernel leaves in each row is the largest bound, and how often the row was chosen.
TEST(SmallestSimulatorBackwardFixed, BoundsAreThoseOfTheFormula) {
  constexpr int kQueries = 3, kHeads = 21, kRows = 90, kTopk = 200;
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  const auto tensor_of = [](const auto& values, DType dtype) {
    Tensor tensor(dtype, {static_cast<std::int64_t>(values.size())});
    std::memcpy(tensor.data(), values.data(), values.size() * sizeof(values[0]));
    return tensor.to(kGpu);
  };
  const auto values_of = [&](int rows, auto&& size) {
    std::vector<BFloat16> values(static_cast<std::size_t>(rows * kColumns));
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = BFloat16(std::ldexp(normal(random), size(static_cast<int>(i) / kColumns)));
    }
    return values;
  };
  const auto q = values_of(kQueries * kHeads, [](int row) { return row % 2; });
  // Squares of the smallest vanish in f32, those of the largest overflow.
  const auto d_out = values_of(kQueries * kHeads, [](int row) { return 70 - 70 * (row / kHeads); });
  const auto kv = values_of(kRows, [](int row) { return row % 3 - 3; });
  std::vector<std::int32_t> indices(kQueries * kTopk);
  for (std::size_t i = 0; i < indices.size(); ++i) {
    indices[i] = static_cast<std::int32_t>(i * 7 % (kRows + 5));  // some are beyond the last row
  }
  std::vector<float> lse(kQueries * kHeads), delta(lse.size());
  for (std::size_t i = 0; i < lse.size(); ++i) {
    lse[i] = i % 4 == 3 ? std::numeric_limits<float>::infinity() : 2 * normal(random);
    delta[i] = std::ldexp(normal(random), 70 - 70 * static_cast<int>(i / kHeads));
  }

  std::vector<double> bounds(kRows);
  std::vector<unsigned> counts(kRows);
  const auto at = [](const std::vector<BFloat16>& values, int row, int column) {
    return static_cast<double>(static_cast<float>(values[std::size_t(row * kColumns + column)]));
  };
  const auto largest_and_length = [&](const std::vector<BFloat16>& values, int row) {
    double largest = 0, squares = 0;
    for (int c = 0; c < kColumns; ++c) {
      largest = std::max(largest, std::fabs(at(values, row, c)));
      squares += at(values, row, c) * at(values, row, c);
    }
    return std::pair{largest, std::sqrt(squares)};
  };
  constexpr double kScale = 0.05;
  for (int i = 0; i < kQueries * kTopk; ++i) {
    const int row = indices[std::size_t(i)], query = i / kTopk;
    if (row >= kRows) continue;
    double bound = 0;
    for (int head = query * kHeads; head < (query + 1) * kHeads; ++head) {
      double logit = 0;
      for (int c = 0; c < kColumns; ++c) logit += at(q, head, c) * at(kv, row, c);
      const auto [of_d_out, length] = largest_and_length(d_out, head);
      const double ds = kScale * largest_and_length(q, head).first *
                        (length * largest_and_length(kv, row).second +
                         std::fabs(static_cast<double>(delta[std::size_t(head)])));
      bound +=
          std::exp(kScale * logit - static_cast<double>(lse[std::size_t(head)])) * (of_d_out + ds);
    }
    bounds[std::size_t(row)] = std::max(bounds[std::size_t(row)], bound);
    ++counts[std::size_t(row)];
  }

  constexpr int kTiles = (kTopk + kTileRows - 1) / kTileRows, kPadded = kQueries * kBlockHeads;
  const auto scratch = [](std::int64_t bytes) { return Tensor(DType::u8, {bytes}).to(kGpu); };
  Tensor q_there = tensor_of(q, DType::bf16), d_out_there = tensor_of(d_out, DType::bf16),
         kv_there = tensor_of(kv, DType::bf16), indices_there = tensor_of(indices, DType::i32),
         lse_there = tensor_of(lse, DType::f32), delta_there = tensor_of(delta, DType::f32),
         lists = scratch(kQueries * kTiles * kTileRows * 4), offsets = scratch(kQueries * 2 * 4),
         lse2 = scratch(kPadded * 4), deltas = scratch(kPadded * 4),
         head_sizes = scratch(kPadded * 8), row_sizes = scratch(kRows * 4),
         row_bounds = scratch(kRows * 4), row_counts = scratch(kRows * 4);
  Params p{};
  p.chosen.kv = static_cast<const char*>(kv_there.data());
  p.chosen.kv_stride = 2 * kColumns;
  p.chosen.indices = static_cast<const std::int32_t*>(indices_there.data());
  p.chosen.indices_stride = kTopk;
  p.chosen.s_kv = kRows;
  p.chosen.topk = kTopk;
  p.q = static_cast<const char*>(q_there.data());
  p.d_out = static_cast<const char*>(d_out_there.data());
  p.q_stride1 = p.d_out_stride1 = 2 * kColumns;
  p.q_stride0 = p.d_out_stride0 = 2 * kColumns * kHeads;
  p.lse = static_cast<const float*>(lse_there.data());
  p.given_delta = static_cast<const float*>(delta_there.data());
  p.lse_stride = p.given_delta_stride = kHeads;
  p.lists = static_cast<std::int32_t*>(lists.data());
  p.offsets = static_cast<std::int32_t*>(offsets.data());
  p.rows = p.chosen;
  p.rows.indices = p.lists;
  p.rows.indices_stride = kTiles * kTileRows;
  p.rows.topk_length = p.offsets + 1;
  p.rows.topk_length_stride = 2;
  p.lse2 = static_cast<float*>(lse2.data());
  p.delta = static_cast<float*>(deltas.data());
  p.head_sizes = static_cast<float2*>(head_sizes.data());
  p.row_sizes = static_cast<float*>(row_sizes.data());
  p.row_bounds = static_cast<unsigned*>(row_bounds.data());
  p.row_counts = static_cast<unsigned*>(row_counts.data());
  p.queries = kQueries;
  p.h_q = kHeads;
  p.blocks = 1;
  p.tiles = kTiles;
  p.columns = kColumns;
  p.ranges = 1;
  p.range_shift = 30;
  p.scale = static_cast<float>(kScale);
  p.scale_log2 = p.scale * kLog2e;
  kTestRuntime.launch(prepare_kernel<true>, kQueries, kPrepareThreads, 0, nullptr, p);
  launch_rows(kTestRuntime, row_sizes_kernel, p, kRows, nullptr);
  constexpr int kShared = sizeof(ScoresLayout<kColumns>);
  kTestRuntime.allow_shared_memory(bounds_kernel<kColumns, Params>, kShared);
  kTestRuntime.launch(bounds_kernel<kColumns, Params>, 2, kScoresThreads, kShared, nullptr, p);
  kTestRuntime.check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  for (int row = 0; row < kRows; ++row) {
    const double bound = bounds[std::size_t(row)];
    EXPECT_NEAR(std::bit_cast<float>(p.row_bounds[row]), bound, 1e-4 * bound) << row;
    EXPECT_EQ(p.row_counts[row], counts[std::size_t(row)]) << row;
  }
}

// More queries than the fused kernel takes at a time on a GPU of two multiprocessors, the first
// ones with smaller gradients: rows change their scale between two chunks. The result is compared
// with the f32 sums of the other mode.
TEST(ThoroughSimulatorBackwardFixed, TwoChunksOfTheFusedKernel) {
  constexpr std::int64_t kQueries = 126, kRows = 30, kTopk = 40;
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  const auto values_of = [&](std::vector<std::int64_t> sizes,
                             const std::function<float(std::int64_t)>& size) {
    Tensor tensor(DType::bf16, sizes);
    auto* const values = static_cast<BFloat16*>(tensor.data());
    for (std::int64_t i = 0; i < tensor.numel(); ++i)
      values[i] = BFloat16(size(i / 512) * normal(random));
    return tensor.to(kGpu);
  };
  Tensor q = values_of({kQueries, 1, 512}, [](std::int64_t) { return 1.0f; });
  Tensor kv = values_of({kRows, 1, 512}, [](std::int64_t) { return 1.0f; });
  Tensor out = values_of({kQueries, 1, 512}, [](std::int64_t) { return 0.2f; });
  Tensor d_out =
      values_of({kQueries, 1, 512}, [](std::int64_t i) { return i < 124 ? 1.0f : 64.0f; });
  Tensor indices(DType::i32, {kQueries, 1, kTopk}), lse(DType::f32, {kQueries, 1});
  for (std::int64_t i = 0; i < indices.numel(); ++i) {
    static_cast<std::int32_t*>(indices.data())[i] = static_cast<std::int32_t>(i * 7 % kRows);
  }
  for (std::int64_t i = 0; i < kQueries; ++i) static_cast<float*>(lse.data())[i] = 4;
  Tensor indices_there = indices.to(kGpu), lse_there = lse.to(kGpu);
  std::vector<Tensor> results;
  for (const bool deterministic : {false, true}) {
    Tensor dq = Tensor(DType::f32, {kQueries, 1, 512}).to(kGpu);
    Tensor dkv = Tensor(DType::f32, {kRows, 1, 512}).to(kGpu);
    BackwardArgs args{.q = q,
                      .kv = kv,
                      .indices = indices_there,
                      .out = out,
                      .lse = lse_there,
                      .d_out = d_out,
                      .deterministic = deterministic,
                      .dq = dq,
                      .dkv = dkv};
    backward(args);
    results.push_back(dq.to({}));
    results.push_back(dkv.to({}));
  }
  for (const std::size_t which : {0u, 1u}) {
    const auto* const sums = static_cast<const float*>(results[which].data());
    const auto* const integers = static_cast<const float*>(results[which + 2].data());
    float largest = 0;
    for (std::int64_t i = 0; i < results[which].numel(); ++i)
      largest = std::max(largest, std::fabs(sums[i]));
    EXPECT_GT(largest, 1);
    for (std::int64_t i = 0; i < results[which].numel(); ++i) {
      ASSERT_NEAR(integers[i], sums[i], 1e-4f * largest) << (which == 0 ? "dq " : "dkv ") << i;
    }
  }
}

}  // namespace
}  // namespace winnow::sparse_mla::backward_split_detail
