// expert_parallel::layout: the case table, an example worked by hand, optional outputs, rejections.
#include "winnow/expert_parallel/layout/layout.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "winnow/testing/expect.h"
#include "winnow/testing/generate.h"

namespace winnow::expert_parallel {
namespace {

using ::testing::ElementsAre;

WINNOW_CASE_TABLE(LayoutCases, "expert_parallel::layout");

// Two nodes of two ranks with two experts each.
class Layout : public ::testing::Test {
 protected:
  Layout()
      : indices_(DType::i32, {4, 3}),
        per_rank_(DType::i32, {4}),
        per_node_(DType::i32, {2}),
        per_expert_(DType::i32, {8}),
        in_rank_(DType::u8, {4, 4}),
        args_{.expert_indices = indices_,
              .experts = 8,
              .world_size = 4,
              .local_world_size = 2,
              .tokens_per_rank = per_rank_,
              .tokens_per_node = per_node_,
              .tokens_per_expert = per_expert_,
              .is_token_in_rank = in_rank_} {
    const std::int32_t indices[] = {
        0, 1,  2,   // ranks 0 and 1, one node
        7, 7,  -1,  // expert 7 twice
        8, -1, 8,   // nothing
        5, 0,  4,   // ranks 2 and 0, both nodes
    };
    std::copy(std::begin(indices), std::end(indices), indices_.values<std::int32_t>().begin());
    for (Tensor* tensor : outputs()) testing::fill_unwritten(*tensor);
  }
  std::vector<Tensor*> outputs() { return {&per_rank_, &per_node_, &per_expert_, &in_rank_}; }

  void expect_refusal(const LayoutArgs& args, const std::string& text) {
    testing::expect_error([&] { layout(args); }, ErrorCode::invalid_argument,
                          "expert_parallel::layout: " + text);
    for (Tensor* tensor : outputs()) {
      EXPECT_EQ(testing::count_unwritten(tensor->view()), tensor->numel()) << text;
    }
  }

  Tensor indices_, per_rank_, per_node_, per_expert_, in_rank_;
  LayoutArgs args_;
};

TEST_F(Layout, FourTokensByHand) {
  EXPECT_EQ(layout(args_), Backend::cpu);
  EXPECT_THAT(per_rank_.values<std::int32_t>(), ElementsAre(2, 1, 1, 1));
  EXPECT_THAT(per_node_.values<std::int32_t>(), ElementsAre(2, 2));
  EXPECT_THAT(per_expert_.values<std::int32_t>(), ElementsAre(2, 1, 1, 0, 1, 1, 0, 2));
  EXPECT_THAT(in_rank_.values<std::uint8_t>(), ElementsAre(1, 1, 0, 0,  //
                                                           0, 0, 0, 1,  //
                                                           0, 0, 0, 0,  //
                                                           1, 0, 1, 0));
}

TEST_F(Layout, EveryOutputMayBeAbsent) {
  for (TensorView LayoutArgs::* output :
       {&LayoutArgs::tokens_per_rank, &LayoutArgs::tokens_per_node, &LayoutArgs::tokens_per_expert,
        &LayoutArgs::is_token_in_rank}) {
    LayoutArgs args = args_;
    args.*output = {};
    layout(args);
  }
  EXPECT_THAT(per_node_.values<std::int32_t>(), ElementsAre(2, 2));
  for (Tensor* tensor : outputs()) testing::fill_unwritten(*tensor);
  layout({.expert_indices = indices_,
          .experts = 8,
          .world_size = 4,
          .local_world_size = 2,
          .tokens_per_node = per_node_});
  EXPECT_THAT(per_node_.values<std::int32_t>(), ElementsAre(2, 2));
  EXPECT_EQ(testing::count_unwritten(per_rank_.view()), 4);
}

TEST_F(Layout, NamesTokenAndValueOfABadIndex) {
  for (const std::int32_t value : {9, -2, std::numeric_limits<std::int32_t>::max(),
                                   std::numeric_limits<std::int32_t>::min()}) {
    indices_.view().at<std::int32_t>(2, 1) = value;
    expect_refusal(args_, "expert_indices: want -1 to 8 (-1 and 8 name no expert), got " +
                              std::to_string(value) + " for token 2, k 1");
  }
  indices_.view().at<std::int32_t>(0, 2) = 10;  // the first one is named
  expect_refusal(args_,
                 "expert_indices: want -1 to 8 (-1 and 8 name no expert), got 10 for token 0, "
                 "k 2");
}

TEST_F(Layout, ADryRunLooksAtNoContents) {
  LayoutArgs args = args_;
  args.expert_indices = testing::without_memory(args.expert_indices);
  EXPECT_EQ(layout(args, {.dry_run = true}), Backend::cpu);
  for (Tensor* tensor : outputs()) {
    EXPECT_EQ(testing::count_unwritten(tensor->view()), tensor->numel());
  }
  args.world_size = 0;
  testing::expect_error([&] { layout(args, {.dry_run = true}); }, ErrorCode::invalid_argument,
                        "expert_parallel::layout: world_size: want at least 1, got 0");
}

TEST_F(Layout, RefusesSizesThatDoNotDivide) {
  LayoutArgs args = args_;
  args.experts = 10;
  expect_refusal(args, "experts: want a multiple of world_size 4 below 2^31, got 10");
  args.experts = 0;
  expect_refusal(args, "experts: want a multiple of world_size 4 below 2^31, got 0");
  args.experts = std::int64_t{1} << 31;
  expect_refusal(args, "experts: want a multiple of world_size 4 below 2^31, got 2147483648");
  args = args_;
  args.local_world_size = 3;
  expect_refusal(args, "local_world_size: want a divisor of world_size 4, got 3");
  args.local_world_size = 0;
  expect_refusal(args, "local_world_size: want a divisor of world_size 4, got 0");
  args.world_size = 0;
  expect_refusal(args, "world_size: want at least 1, got 0");
}

TEST_F(Layout, RefusesTensorsOfOtherForms) {
  LayoutArgs args = args_;
  args.expert_indices = {};
  expect_refusal(args, "expert_indices: want a tensor [n, K], got none");
  args.expert_indices = Tensor(DType::i64, {4, 3});
  expect_refusal(args, "expert_indices: want dtype i32, got i64");
  args.expert_indices = ConstTensorView(indices_.data(), DType::i32, {12});
  expect_refusal(args, "expert_indices: want 2 dimensions [n, K], got shape [12]");
  args.expert_indices = indices_.view().transpose(0, 1);
  expect_refusal(args, "expert_indices: want stride 1 in the last dimension, got strides [1, 3]");
  const Tensor many(DType::i32, {4, 33}), none(DType::i32, {4, 0});
  args.expert_indices = many;
  expect_refusal(args, "expert_indices: want K from 1 to 32, got 33");
  args.expert_indices = none;
  expect_refusal(args, "expert_indices: want K from 1 to 32, got 0");
  args.expert_indices = ConstTensorView(indices_.data(), DType::i32, {1 << 29, 4}, {0, 1});
  expect_refusal(args,
                 "expert_indices: want fewer than 2^31 pairs, got 536870912 tokens of 4 experts");

  args = args_;
  args.tokens_per_rank = TensorView(indices_.data(), DType::i32, {4});
  expect_refusal(args,
                 "tokens_per_rank: want memory apart from expert_indices, got memory that both "
                 "use");
  args = args_;
  args.tokens_per_rank = per_expert_;
  expect_refusal(args, "tokens_per_rank: want shape [W=4], got [8]");
  args = args_;
  args.tokens_per_node = per_rank_;
  expect_refusal(args, "tokens_per_node: want shape [W/L=2], got [4]");
  args = args_;
  args.tokens_per_expert = per_rank_;
  expect_refusal(args, "tokens_per_expert: want shape [E=8], got [4]");
  args = args_;
  Tensor wide(DType::i32, {4, 4});
  args.is_token_in_rank = wide;
  expect_refusal(args, "is_token_in_rank: want dtype u8, got i32");
  args.is_token_in_rank = TensorView(in_rank_.data(), DType::u8, {4, 4}, {0, 1});
  expect_refusal(args,
                 "is_token_in_rank: want an output whose elements do not share memory, got shape "
                 "[4, 4] with strides [0, 1]");
  args.is_token_in_rank = TensorView(in_rank_.data(), DType::u8, {4, 4}, Device{DeviceType::cuda});
  expect_refusal(args, "is_token_in_rank: want device cpu, got cuda:0");
}

// An index that another thread rewrites makes the counts wrong, or the call is refused; nothing is
// written out of bounds.
TEST_F(Layout, AnIndexThatChangesMeanwhileLeadsNowhere) {
  constexpr std::int32_t kFar = 1 << 30;
  auto* index = static_cast<std::int32_t*>(indices_.data());
  std::atomic<bool> over{false};
  std::thread other([&] {
    for (std::int32_t value = 0; !over; value = kFar - value) {
      std::atomic_ref(*index).store(value, std::memory_order_relaxed);
    }
  });
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(300);
  int refused = 0, counted = 0;
  while (std::chrono::steady_clock::now() < end) {
    try {
      layout(args_);
      ++counted;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      EXPECT_THAT(error.what(), ::testing::HasSubstr("1073741824 for token 0, k 0"));
      ++refused;
    }
  }
  over = true;
  other.join();
  EXPECT_GT(refused, 0);
  EXPECT_GT(counted, 0);
}

}  // namespace
}  // namespace winnow::expert_parallel
