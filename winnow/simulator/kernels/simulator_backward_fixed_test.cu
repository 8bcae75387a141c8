// The deterministic mode of sparse_mla::backward by itself: rows that keep their scale from chunk
// to chunk of queries or lose it, and sums at their limits, for which whole calls are too large.
// The additions are the test's own.
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "winnow/core/tensor.h"
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

  // What the entries of a chunk of queries ask for.
  void choose(std::int64_t row, float bound, unsigned entries) {
    params_.row_bounds[row] = std::bit_cast<unsigned>(bound);
    params_.row_counts[row] = entries;
  }
  void settle() { launch_rows(kTestRuntime, settle_kernel, params_, rows_, nullptr); }
  float scale(std::int64_t row) const { return params_.row_states[row].scale; }
  // `times` addends, whose columns are value(column), as FixedDrain adds them.
  void add(std::int64_t row, std::uint64_t times, const std::function<float(int)>& value) {
    for (int column = 0; column < kColumns; column += 2) {
      const auto word = [&](int c) {
        return std::uint64_t{__float_as_uint(fmaf(value(c), scale(row), kRounder))};
      };
      params_.fixed[(row * kColumns + column) / 2] +=
          times * (word(column + 1) << 32 | word(column));
    }
  }
  void fold() { launch_rows(kTestRuntime, fold_kernel, params_, rows_, nullptr); }
  float result(std::int64_t row, int column) const { return params_.dkv[row * kColumns + column]; }

 private:
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
        // Even columns down, odd ones up: the borrow of the one is in the other's half.
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

}  // namespace
}  // namespace winnow::sparse_mla::backward_split_detail
