#include "tools/winnow/demo/layer.h"

#include <string>

#include "tools/winnow/demo/comparison.h"
#include <gtest/gtest.h>

namespace winnow::demo {
namespace {

constexpr std::int64_t kTokens = 160;
constexpr std::int64_t kTopk = 24;
constexpr double kLargestLogit = 40;  // what the tolerances allow for
constexpr Placement kBf16OnCpu = {.dtype = DType::bf16, .options = {.backend = Backend::cpu}};

std::string text() {
  std::string result;
  while (result.size() < kTokens) result += "Wheat is winnowed from chaff; wind sorts the grain. ";
  return result.substr(0, kTokens);
}

std::vector<std::int64_t> all_positions() {
  std::vector<std::int64_t> result;
  for (std::int64_t i = 0; i < kTokens; ++i) result.push_back(i);
  return result;
}

bool is_bf16(const Tensor& tensor) {
  for (const float value : tensor.values<float>()) {
    if (static_cast<float>(BFloat16(value)) != value) return false;
  }
  return true;
}

// `got` against `wanted`, relative to the largest magnitude of `wanted` in each row.
void expect_rows_near(const Tensor& got, const Tensor& wanted, double tolerance) {
  ASSERT_EQ(got.numel(), wanted.numel());
  const std::int64_t rows = wanted.size(0), length = wanted.numel() / rows;
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::vector<double> expected =
        to_double(wanted.values<float>().subspan(row * length, length));
    const double difference =
        largest_difference(got.values<float>().subspan(row * length, length), expected);
    EXPECT_LE(difference / largest_magnitude(expected), tolerance) << "row " << row;
  }
}

void expect_passed(const StepReport& report) {
  for (const Check& check : report.checks()) {
    EXPECT_TRUE(check.passed) << check.what << ": " << check.found;
  }
}

class LayerInBf16 : public ::testing::Test {
 protected:
  // Both layers have the same numbers; only the type that the operations see differs.
  LayerInBf16()
      : bf16_(embed(text()), kBf16OnCpu), f32_({bf16_.q().clone(), bf16_.kv().clone()}, {}) {}

  void compare(const std::vector<std::int64_t>& positions) {
    Random random(3);
    const Selection selection = choose_random(positions, kTopk, random);
    const LayerOutput got = bf16_.forward(selection), wanted = f32_.forward(selection);
    EXPECT_EQ(got.out.dtype(), DType::f32);
    EXPECT_TRUE(is_bf16(got.out));  // it did go through bf16
    EXPECT_FALSE(is_bf16(wanted.out));
    expect_rows_near(got.out, wanted.out, kBf16Tolerances.out);
    EXPECT_LE(largest_difference(got.lse.values<float>(), to_double(wanted.lse.values<float>())),
              kBf16Tolerances.lse);
    EXPECT_LT(largest_magnitude(to_double(wanted.lse.values<float>())), kLargestLogit);
    const Tensor got_sum = bf16_.distribution(selection, got.lse);
    expect_rows_near(got_sum, f32_.distribution(selection, wanted.lse), kBf16Tolerances.weights);

    StepReport report;
    const auto rows = spread_rows(static_cast<std::int64_t>(positions.size()), 4);
    check_output_against_plain(bf16_, selection, got, rows, report);
    check_weights_against_plain(bf16_, selection, got_sum, rows, report);
    check_row_sums(got_sum, report);
    expect_passed(report);
  }

  Layer bf16_;
  Layer f32_;
};

TEST_F(LayerInBf16, RoundsQAndKvOnce) {
  const Embedding exact = embed(text());
  EXPECT_FALSE(is_bf16(exact.q));
  EXPECT_TRUE(is_bf16(bf16_.q()));
  EXPECT_TRUE(is_bf16(bf16_.kv()));
  expect_rows_near(bf16_.q(), exact.q, 0x1p-8);
  expect_rows_near(bf16_.kv(), exact.kv, 0x1p-8);
}

TEST_F(LayerInBf16, AgreesWithF32ForAllQueries) { compare(all_positions()); }

TEST_F(LayerInBf16, AgreesWithF32ForAWindowOfQueries) { compare({70, 71, 72, 73}); }

TEST_F(LayerInBf16, AgreesWithF32ForScatteredQueries) { compare({150, 3, 77, 77, 159}); }

TEST_F(LayerInBf16, AgreesWithF32OverAllRows) {
  const std::vector<std::int64_t> positions = {9, 64, 159};
  const DenseAttention got = bf16_.dense(positions), wanted = f32_.dense(positions);
  EXPECT_TRUE(is_bf16(got.output.out));
  expect_rows_near(got.output.out, wanted.output.out, kBf16Tolerances.out);
  expect_rows_near(got.attn_sum, wanted.attn_sum, kBf16Tolerances.weights);
}

TEST(Layer, TellsWhichBackendRanWhat) {
  Layer layer(embed(text()), kBf16OnCpu);
  EXPECT_EQ(to_string(layer.backends_used()), "");
  layer.dense(all_positions());
  EXPECT_EQ(to_string(layer.backends_used()), "cpu");
  BackendsUsed several = layer.backends_used();
  several[Backend::sm90] = {"forward", "distribution"};
  several[Backend::cpu] = {"backward", "decode"};
  EXPECT_EQ(to_string(several), "sm90 (forward, distribution), cpu (backward, decode)");
}

TEST(Layer, NamesTheCpuWhereTheGpuHasNoKernels) {
  Placement placement;
  EXPECT_FALSE(placement.cpu_options().backend.has_value());
  placement.device.type = DeviceType::cuda;
  placement.options.backend = Backend::sm90;
  EXPECT_EQ(placement.cpu_options().backend, Backend::cpu);
}

}  // namespace
}  // namespace winnow::demo
