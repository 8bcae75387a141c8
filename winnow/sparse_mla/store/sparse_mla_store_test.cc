// sparse_mla::store: the case table, rows worked by hand, and what it refuses.
#include <bit>
#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "winnow/cache/cache_cases.h"
#include "winnow/sparse_mla/store/store.h"
#include "winnow/testing/expect.h"
#include "winnow/testing/generate.h"

namespace winnow::sparse_mla {
namespace {

using winnow::testing::expect_error;
using winnow::testing::expect_refused;

WINNOW_CASE_TABLE(StoreCases, "sparse_mla::store");

TEST(CacheScale, IsTheSmallestPowerOfTwoThatHoldsTheLargestMagnitude) {
  EXPECT_EQ(cache_scale(448), 1.0f);
  EXPECT_EQ(cache_scale(450), 2.0f);
  EXPECT_EQ(cache_scale(446), 1.0f);
  EXPECT_EQ(cache_scale(224), 0.5f);
  EXPECT_EQ(cache_scale(0), std::ldexp(1.0f, -22));  // 1e-4 / 448 is 2.2e-7
  EXPECT_EQ(cache_scale(1e-4f), std::ldexp(1.0f, -22));
  EXPECT_TRUE(std::isnan(cache_scale(std::numeric_limits<float>::infinity())));
  EXPECT_TRUE(std::isnan(cache_scale(std::nanf(""))));
  // All bf16 that are finite: 448 * scale reaches the magnitude, and half of the scale would not.
  for (std::uint32_t bits = 0; bits < 0x7f80; ++bits) {
    const float amax = std::bit_cast<float>(bits << 16);
    const double scale = cache_scale(amax), least = std::max(double(amax), double(1e-4f));
    ASSERT_TRUE(448 * scale >= least && 448 * scale / 2 < least) << amax;
    ASSERT_EQ(ue8m0_to_f32(scale_to_ue8m0(cache_scale(amax))), cache_scale(amax)) << amax;
  }
  EXPECT_EQ(ue8m0_to_f32(0), std::ldexp(1.0f, -127));
  EXPECT_TRUE(std::isnan(ue8m0_to_f32(255)));
}

struct Problem {
  Tensor rows{DType::bf16, {3, 576}}, slots{DType::i64, {3}};
  Tensor cache{DType::u8, {2, 4, 1, 656}};
  Problem() {
    for (std::int64_t i = 0; i < 3; ++i) slots.values<std::int64_t>()[i] = i;
    winnow::testing::fill_unwritten(cache);
  }
  StoreArgs args() { return {.rows = rows, .slots = slots, .cache = cache}; }
  void expect_untouched(const std::string& text) {
    EXPECT_EQ(winnow::testing::count_unwritten(cache.view()), cache.numel()) << text;
  }
};

TEST(Store, ByHand656) {
  Problem problem;
  problem.rows.view().at<BFloat16>(0, 0) = BFloat16(448.0f);
  problem.rows.view().at<BFloat16>(0, 1) = BFloat16(-1.0f);
  problem.rows.view().at<BFloat16>(0, 128) = BFloat16(896.0f);
  problem.rows.view().at<BFloat16>(0, 512) = BFloat16(3.0f);
  problem.slots.values<std::int64_t>()[0] = 6;
  problem.slots.values<std::int64_t>()[1] = -5;
  problem.slots.values<std::int64_t>()[2] = 0;
  EXPECT_EQ(to_string(store(problem.args())), "cpu");
  const auto byte = [&](int at) { return problem.cache.view().at<std::uint8_t>(1, 2, 0, at); };
  EXPECT_EQ(byte(0), 0x7e);
  EXPECT_EQ(byte(1), 0xb8);
  EXPECT_EQ(byte(128), 0x7e);
  EXPECT_EQ(byte(512 + 3), 0x3f);  // 1.0f
  EXPECT_EQ(byte(516 + 3), 0x40);  // 2.0f
  EXPECT_EQ(byte(528), 0x40);      // the bf16 0x4040 is 3
  EXPECT_EQ(byte(529), 0x40);
  EXPECT_EQ(winnow::testing::count_unwritten(problem.cache.view()), problem.cache.numel() - 1312);
}

TEST(Store, ByHand584) {
  Tensor rows(DType::bf16, {1, 512}), slots(DType::i32, {1}), cache(DType::u8, {1, 4, 1, 584});
  winnow::testing::fill_unwritten(cache);
  rows.view().at<BFloat16>(0, 64) = BFloat16(-896.0f);
  rows.view().at<BFloat16>(0, 511) = BFloat16(3.0f);
  slots.values<std::int32_t>()[0] = 2;
  store({.rows = rows, .slots = slots, .format = CacheFormat::fp8_584, .cache = cache});
  const std::uint8_t* bytes = cache.values<std::uint8_t>().data();
  EXPECT_EQ(bytes[2 * 576 + 64], 0xfe);
  EXPECT_EQ(bytes[2 * 576 + 574], 0x40);
  EXPECT_EQ(bytes[2 * 576 + 575], 0x40);
  EXPECT_EQ(bytes[4 * 576 + 2 * 8], 127 - 22);
  EXPECT_EQ(bytes[4 * 576 + 2 * 8 + 1], 128);
  EXPECT_EQ(bytes[4 * 576 + 2 * 8 + 7], 0);
  EXPECT_EQ(winnow::testing::count_unwritten(cache.view()), cache.numel() - 584);
}

TEST(Store, Refuses) {
  Problem other;
  Tensor f32(DType::f32, {3, 576}), narrow(DType::bf16, {3, 512}), short_slots(DType::i64, {2});
  Tensor wrong(DType::u8, {2, 4, 1, 584}), flat(DType::u8, {2, 4, 656});
  Tensor two_heads(DType::u8, {2, 4, 2, 656}), wide(DType::f32, {2, 4, 1, 656});
  const auto reject = [](const auto& bend, const std::string& text) {
    Problem problem;
    StoreArgs args = problem.args();
    bend(args);
    expect_error([&] { store_workspace_bytes(args); }, ErrorCode::invalid_argument,
                 "sparse_mla::store: " + text);
    expect_refused(store, args, "sparse_mla::store: " + text, {problem.cache});
  };
  using Args = StoreArgs;
  reject([](Args& a) { a.rows = {}; }, "rows: want a tensor [n, columns], got none");
  reject([&](Args& a) { a.rows = f32; }, "rows: want dtype bf16, got f32");
  reject([&](Args& a) { a.rows = narrow; }, "rows: want shape [n=3, columns=576], got [3, 512]");
  reject([&](Args& a) { a.slots = short_slots; }, "slots: want shape [n=3], got [2]");
  reject([&](Args& a) { a.slots = f32.view().slice(1, 0, 1); },
         "slots: want shape [n=3], got [3, 1]");
  reject([](Args& a) { a.cache = {}; },
         "cache: want a tensor [blocks, block_size, 1, 656], got none");
  reject([&](Args& a) { a.cache = flat; },
         "cache: want 4 dimensions [blocks, block_size, 1, 656], got shape [2, 4, 656]");
  const std::string formats =
      " (fp8_656 has rows of 656 bytes, fp8_584 of 584, fp8_576 of 576, bf16 of 576 or 512 "
      "elements), got a last dimension of ";
  reject([&](Args& a) { a.cache = wrong; },
         "cache: want [blocks, block_size, 1, 656] for the format fp8_656" + formats + "584");
  reject([](Args& a) { a.format = CacheFormat::fp8_584; },
         "cache: want [blocks, block_size, 1, 584] for the format fp8_584" + formats + "656");
  reject([](Args& a) { a.format = CacheFormat::bf16; },
         "cache: want [blocks, block_size, 1, 576 or 512] for the format bf16" + formats + "656");
  reject([&](Args& a) { a.cache = two_heads; },
         "cache: want shape [blocks=2, block_size=4, 1, row=656], got [2, 4, 2, 656]");
  reject([&](Args& a) { a.cache = wide; }, "cache: want dtype u8 or f8_e4m3, got f32");
  reject(
      [&](Args& a) {
        a.cache = TensorView(other.cache.data(), DType::u8, {2, 4, 1, 656}, {0, 656, 656, 1});
      },
      "cache: want an output whose elements do not share memory, got shape [2, 4, 1, 656] with "
      "strides [0, 656, 656, 1]");
  reject(
      [&](Args& a) {
        a.cache = TensorView(other.cache.data(), DType::u8, {2, 4, 1, 656}, {1312, 656, 656, 2});
      },
      "cache: want stride 1 in the last dimension, got strides [1312, 656, 656, 2]");
  reject(
      [&](Args& a) {
        a.format = CacheFormat::fp8_584;
        a.cache = TensorView(other.cache.data(), DType::u8, {2, 4, 1, 584}, {2336, 584, 584, 1});
      },
      "cache: want blocks at least 2880 bytes apart, which is block_size * 584 rounded up to a "
      "multiple of 576, got a stride of 2336");
  reject(
      [&](Args& a) {
        a.format = CacheFormat::fp8_584;
        a.cache = TensorView(other.cache.data(), DType::u8, {2, 4, 1, 584}, {2880, 600, 584, 1});
      },
      "cache: want rows 584 elements apart, the nominal layout of fp8_584, got a stride of 600");
  expect_error([] { cache_format_from_string("fp8"); }, ErrorCode::invalid_argument,
               "cache_format_from_string: format: want fp8_656, fp8_584, fp8_576 or bf16, got fp8");
  EXPECT_EQ(int(cache_format_from_string("fp8_584")), int(CacheFormat::fp8_584));
}

// No memory is behind these: a cache of 2^31 slots is refused by its shape.
TEST(Store, RefusesMoreSlotsThanIndicesCount) {
  Problem problem;
  StoreArgs args = problem.args();
  void* nowhere = reinterpret_cast<void*>(std::uintptr_t{4096});
  args.cache = TensorView(nowhere, DType::u8, {std::int64_t{1} << 25, 64, 1, 656});
  const RunOptions dry_run{.dry_run = true};
  expect_error([&] { store(args, dry_run); }, ErrorCode::invalid_argument,
               "sparse_mla::store: cache: want at most 2^31 - 1 slots, the range of the indices, "
               "got 33554432 blocks of 64");
  args.cache = TensorView(nowhere, DType::u8, {(std::int64_t{1} << 25) - 1, 64, 1, 656});
  EXPECT_EQ(to_string(store(args, dry_run)), "cpu");
}

// The stride of a single block, or of a single row in it, steps nowhere: any number is allowed.
TEST(Store, TakesAnyStrideOfASingleEntry) {
  constexpr std::int64_t kFar = std::numeric_limits<std::int64_t>::min() / 2 - 1;
  for (const auto& [format, dtype, row] :
       {std::tuple{CacheFormat::bf16, DType::bf16, 576}, {CacheFormat::fp8_656, DType::u8, 656}}) {
    Tensor rows(DType::bf16, {1, 576}), slots(DType::i64, {1}), cache(dtype, {1, 1, 1, row});
    winnow::testing::fill_unwritten(cache);
    const TensorView far(cache.data(), dtype, {1, 1, 1, row}, {kFar, kFar, kFar, 1});
    store({.rows = rows, .slots = slots, .format = format, .cache = far});
    EXPECT_EQ(winnow::testing::count_unwritten(cache.view()), 0);
  }
}

TEST(Store, RefusesSlotsAndOverlap) {
  Problem problem;
  const auto reject = [&](const StoreArgs& args, const std::string& text) {
    expect_error([&] { store(args); }, ErrorCode::invalid_argument, "sparse_mla::store: " + text);
    problem.expect_untouched(text);
  };
  std::int64_t* slots = problem.slots.values<std::int64_t>().data();
  slots[1] = 8;
  reject(problem.args(), "slots: want slots below 2 blocks * 4 slots, got slot 8 for row 1");
  slots[1] = 2;
  reject(problem.args(), "slots: want each slot at most once, got slot 2 for row 1 and row 2");
  slots[1] = 0;
  StoreArgs args = problem.args();
  slots[0] = -1;
  Tensor empty(DType::u8, {3, 0, 1, 656});
  args.cache = empty;
  reject(args, "slots: want slots below 0 blocks * 1 slots, got slot 0 for row 1");
  args = problem.args();
  args.slots = ConstTensorView(problem.cache.data(), DType::i64, {3});
  reject(args, "cache: want memory apart from slots, got memory that both use");
}

}  // namespace
}  // namespace winnow::sparse_mla
