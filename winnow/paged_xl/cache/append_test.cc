// paged_xl::append: the case table, slots worked by hand, rejections.
#include "winnow/paged_xl/cache/append.h"

#include <algorithm>
#include <array>
#include <limits>
#include <memory>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "winnow/paged_xl/test_step.h"
#include "winnow/testing/far_memory.h"

namespace winnow::paged_xl {
namespace {

WINNOW_CASE_TABLE(AppendCases, "paged_xl::append");

class Append : public ::testing::Test {
 protected:
  Append()
      : key_(DType::bf16, {3, 2, 32}),
        value_(DType::bf16, {3, 2, 32}),
        slots_(DType::i64, {3}),
        key_cache_(DType::bf16, {4, 2, 4, 8, 8}),
        value_cache_(DType::bf16, {4, 2, 32, 8}),
        good_{key_, value_, slots_, key_cache_, value_cache_},
        args_(good_) {
    testing::Random random(1);
    testing::fill_normal(key_, random);
    testing::fill_normal(value_, random);
    testing::fill_unwritten(key_cache_);
    testing::fill_unwritten(value_cache_);
    set_slots({1, 2, 3});
  }
  void set_slots(std::initializer_list<std::int64_t> slots) {
    std::copy(slots.begin(), slots.end(), slots_.values<std::int64_t>().begin());
  }
  // A call with args_ is refused so. Afterwards they are good again.
  void expect_error(const std::string& message) {
    expect_refusal([&] { append(args_); }, "paged_xl::append: " + message);
    args_ = good_;
    EXPECT_EQ(testing::count_unwritten(key_cache_.view()), key_cache_.numel());
    EXPECT_EQ(testing::count_unwritten(value_cache_.view()), value_cache_.numel());
  }
  Tensor key_, value_, slots_, key_cache_, value_cache_;
  const AppendArgs good_;
  AppendArgs args_;
};

TEST_F(Append, ASlotIsBlockTimesBlockSizePlusOffset) {
  set_slots({3 * 8 + 5, -1, 0});
  append(args_);
  const auto key = [&](std::int64_t t, std::int64_t h, std::int64_t d) {
    return key_.view().at<BFloat16>(t, h, d).bits;
  };
  EXPECT_EQ(key_cache_.view().at<BFloat16>(3, 1, 2, 5, 6).bits, key(0, 1, 2 * 8 + 6));
  EXPECT_EQ(key_cache_.view().at<BFloat16>(0, 0, 3, 0, 7).bits, key(2, 0, 31));
  EXPECT_EQ(value_cache_.view().at<BFloat16>(3, 1, 22, 5).bits,
            value_.view().at<BFloat16>(0, 1, 22).bits);
  // Two tokens are stored, the skipped one nowhere.
  EXPECT_EQ(testing::count_unwritten(key_cache_.view()), key_cache_.numel() - 2 * 2 * 32);
  EXPECT_EQ(testing::count_unwritten(value_cache_.view()), value_cache_.numel() - 2 * 2 * 32);
}

TEST_F(Append, RejectsSlotsBeyondTheCache) {
  set_slots({1, 32, 2});
  expect_error("slot_mapping: want slots below 4 blocks * 8 slots, got slot 32 for token 1");
  set_slots({1, 2, std::numeric_limits<std::int64_t>::max()});
  expect_error(
      "slot_mapping: want slots below 4 blocks * 8 slots, got slot 9223372036854775807 "
      "for token 2");
}

TEST_F(Append, RejectsSlotsWrittenTwice) {
  set_slots({17, 4, 17});
  expect_error("slot_mapping: want each slot at most once, got slot 17 for token 0 and token 2");
  set_slots({6, 6, -1});
  expect_error("slot_mapping: want each slot at most once, got slot 6 for token 0 and token 1");
}

TEST_F(Append, SkipsTheSameNegativeSlotTwice) {
  set_slots({-1, -1, std::numeric_limits<std::int64_t>::min()});
  append(args_);
  EXPECT_EQ(testing::count_unwritten(key_cache_.view()), key_cache_.numel());
}

TEST_F(Append, RejectsACacheThatOverlaps) {
  args_.key = ConstTensorView(key_cache_.data(), DType::bf16, {3, 2, 32});
  expect_error("key_cache: want memory apart from key, got memory that both use");
  args_.value_cache = TensorView(key_cache_.data(), DType::bf16, {4, 2, 32, 8});
  expect_error("value_cache: want memory apart from key_cache, got memory that both use");
}

TEST_F(Append, TakesCachesOfOneBuffer) {  // [blocks, 2, ...], as engines allocate them
  Tensor both(DType::bf16, {4, 2, 512});
  AppendArgs args = args_;
  args.key_cache = TensorView(both.data(), DType::bf16, {4, 2, 4, 8, 8}, {1024, 256, 64, 8, 1});
  args.value_cache =
      TensorView(both.view().slice(1, 1, 2).data(), DType::bf16, {4, 2, 32, 8}, {1024, 256, 8, 1});
  append(args);
}

TEST_F(Append, RejectsWrongTensors) {
  args_.key = {};
  expect_error("key: want a tensor [num_tokens, num_kv_heads, head_size], got none");
  args_.value = value_.view().slice(0, 0, 2);
  expect_error("value: want shape [num_tokens=3, num_kv_heads=2, head_size=32], got");
  args_.key_cache = TensorView(key_cache_.data(), DType::bf16, {4, 2, 8, 8, 4});
  expect_error(
      "key_cache: want shape [num_blocks=4, num_kv_heads=2, head_size/x=4, "
      "block_size=8, x=8], got [4, 2, 8, 8, 4]");
  args_.value_cache =
      TensorView(value_cache_.data(), DType::bf16, {4, 2, 32, 8}, {512, 256, 1, 32});
  expect_error("value_cache: want stride 1 in the last dimension");
  args_.key_cache = TensorView(key_cache_.data(), DType::bf16, {4, 2, 4, 8, 8}, {0, 256, 64, 8, 1});
  expect_error("key_cache: want an output whose elements do not share memory");
  args_.key_cache = TensorView(key_cache_.data(), DType::f16, {4, 2, 4, 8, 8});
  expect_error("key_cache: want dtype bf16, got f16");
  const Tensor floats(DType::f32, {3});
  args_.slot_mapping = floats;
  expect_error("slot_mapping: want dtype i64 or i32, got f32");
}

TEST_F(Append, ADryRunLooksAtNoContents) {
  AppendArgs args = args_;
  for (auto* view : {&args.key, &args.value, &args.slot_mapping}) {
    *view = testing::without_memory(*view);
  }
  for (auto* view : {&args.key_cache, &args.value_cache}) *view = testing::without_memory(*view);
  EXPECT_EQ(append(args, {.dry_run = true}), Backend::cpu);
  args.value = args.value.slice(0, 0, 2);
  expect_refusal([&] { append(args, {.dry_run = true}); }, "paged_xl::append: value: want shape");
}

TEST(AppendFar, ReachesSlotsBeyondTwoToTheThirtyOneBytes) {
  constexpr std::int64_t kBlocks = 600001;  // of 8 KiB each
  const auto bytes = static_cast<std::size_t>(kBlocks) * 8192;
  const std::shared_ptr<void> memory[2] = {testing::far_memory(bytes), testing::far_memory(bytes)};
  if (memory[1] == nullptr) GTEST_SKIP() << "no address range of " << bytes << " bytes";
  const TensorView keys(memory[0].get(), DType::f32, {kBlocks, 2, 16, 16, 4});
  const TensorView values(memory[1].get(), DType::f32, {kBlocks, 2, 64, 16});
  Tensor token(DType::f32, {2, 2, 64}), slots(DType::i64, {2});
  testing::Random random(1);
  testing::fill_normal(token, random);
  slots.view().at<std::int64_t>(0) = 262144 * 16 + 3;  // starts at byte 2^31
  slots.view().at<std::int64_t>(1) = (kBlocks - 1) * 16 + 15;
  append({token, token, slots, keys, values});
  for (const auto& [t, block, offset] :
       {std::array<std::int64_t, 3>{0, 262144, 3}, {1, kBlocks - 1, 15}}) {
    for (std::int64_t d = 0; d < 64; ++d) {
      ASSERT_EQ(keys.at<float>(block, 1, d / 4, offset, d % 4), token.view().at<float>(t, 1, d));
      ASSERT_EQ(values.at<float>(block, 1, d, offset), token.view().at<float>(t, 1, d));
    }
  }
}

}  // namespace
}  // namespace winnow::paged_xl
