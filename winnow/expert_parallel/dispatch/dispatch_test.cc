// What dispatch and combine do beyond moving rows: where memory comes from and goes, strided
// tensors, and the route between nodes in chunks. all_to_all_test.cc compares with the oracle.
#include <chrono>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "winnow/expert_parallel/all_to_all/all_to_all.h"
#include "winnow/expert_parallel/testing/leftovers.h"
#include "winnow/expert_parallel/testing/ranks.h"
#include "winnow/testing/far_memory.h"

namespace winnow::expert_parallel {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

constexpr std::int64_t kHidden = 8;

void run(int world, const Config& config, const std::function<void(AllToAll&, int)>& body) {
  RankTeam team(world);
  team.run([&](int rank, const std::shared_ptr<Transport>& transport) {
    AllToAll layer(transport, team.world().store(), config);
    body(layer, rank);
  });
}

// Token t of rank r holds 100 r + t in every column.
Tensor tokens(int rank, std::int64_t count) {
  Tensor result(DType::f32, {count, kHidden});
  for (std::int64_t i = 0; i < count * kHidden; ++i) {
    result.values<float>()[std::size_t(i)] = float(100 * rank + i / kHidden);
  }
  return result;
}
Tensor indices(std::vector<std::int32_t> values, int topk) {
  Tensor result(DType::i32, {std::int64_t(values.size()) / topk, topk});
  std::copy(values.begin(), values.end(), result.values<std::int32_t>().begin());
  return result;
}
std::vector<float> first_column(const ConstTensorView& rows) {
  std::vector<float> column;
  for (std::int64_t i = 0; i < rows.size(0); ++i) column.push_back(rows.at<float>(i, 0));
  return column;
}

constexpr Config kTwoRanks{
    .max_tokens = 4, .hidden = kHidden, .topk = 2, .experts = 4, .dtype = DType::f32};

// 2 ranks x 2 experts. Rank 0 sends token 0 to experts 0 and 3, token 1 to expert 2 twice, token 2
// to expert 1; rank 1 its token 0 to experts 1 and 0, token 1 to expert 3.
Tensor example_indices(int rank) {
  return rank == 0 ? indices({0, 3, 2, 2, 4, 1}, 2) : indices({1, 0, 3, -1}, 2);
}

// The output is borrowed: experts may overwrite it in place, and combine reads it where it is.
TEST(Dispatch, RowsOverwrittenInPlaceNeedNoCopy) {
  run(2, kTwoRanks, [](AllToAll& layer, int rank) {
    const Tensor input = tokens(rank, rank == 0 ? 3 : 2);
    Dispatched got = layer.dispatch({.input = input, .expert_indices = example_indices(rank)});
    for (float& value : got.output.values<float>()) value *= 2;
    const TensorView buffer = layer.combine_buffer(*got.descriptor);
    for (std::int64_t i = 0; i < buffer.numel(); ++i) static_cast<float*>(buffer.data())[i] = -7;
    const Tensor sums = layer.combine({.expert_output = got.output}, *got.descriptor);
    if (rank == 0) {
      EXPECT_THAT(first_column(sums), ElementsAre(0, 4, 4));
    }
    if (rank == 1) {
      EXPECT_THAT(first_column(sums), ElementsAre(400, 202));
    }
    EXPECT_EQ(buffer.at<float>(0, 0), -7);
  });
}

TEST(Dispatch, BorrowedRowsAreReusedOnlyWhenTheyAreGone) {
  Config config = kTwoRanks;
  config.arena_rows = 100;
  run(2, config, [](AllToAll& layer, int rank) {
    const Tensor input = tokens(rank, rank == 0 ? 3 : 2), routing = example_indices(rank);
    const auto dispatch = [&] {
      return layer.dispatch({.input = input, .expert_indices = routing});
    };
    Dispatched first = dispatch();
    const void* memory = first.output.data();
    Dispatched second = dispatch();
    EXPECT_NE(second.output.data(), memory);
    EXPECT_THAT(first_column(first.output), first_column(second.output));
    first = {};
    second = {};
    EXPECT_EQ(dispatch().output.data(), memory);
  });
}

// Every rank keeps outputs until two are in use: the arena grows for all, and shrinks when what
// they kept is gone.
TEST(Dispatch, TheArenaGrowsAndGivesBack) {
  Config config = kTwoRanks;
  config.arena_rows = 1;
  run(2, config, [](AllToAll& layer, int rank) {
    const Tensor input = tokens(rank, rank == 0 ? 3 : 2), routing = example_indices(rank);
    const auto dispatch = [&] {
      return layer.dispatch({.input = input, .expert_indices = routing});
    };
    const std::int64_t begin = layer.arena_bytes();
    std::vector<Dispatched> kept;
    for (int i = 0; i < 6; ++i) kept.push_back(dispatch());
    const std::int64_t grown = layer.arena_bytes();
    EXPECT_GT(grown, begin);
    for (const Dispatched& one : kept) {
      EXPECT_THAT(first_column(one.output), first_column(kept[0].output));
    }
    kept.clear();
    dispatch();
    EXPECT_LT(layer.arena_bytes(), grown);
    EXPECT_GT(layer.arena_bytes(), begin);
  });
}

// 2 nodes of 2 ranks, one expert per rank: chunks of which some in the middle are empty for the
// other node.
TEST(Dispatch, ChunksAlongTheRail) {
  constexpr Config kRails{.max_tokens = 700,
                          .hidden = kHidden,
                          .topk = 2,
                          .experts = 4,
                          .dtype = DType::f32,
                          .local_world_size = 2};
  run(4, kRails, [](AllToAll& layer, int rank) {
    const std::int64_t count = rank == 3 ? 0 : 700;
    const int other = rank < 2 ? 2 : 0;  // the first expert of the other node
    std::vector<std::int32_t> experts;
    for (std::int64_t t = 0; t < count; ++t) {
      const bool away = t < 256 || t >= 512;
      experts.insert(experts.end(), {rank, away ? other + std::int32_t(t % 2) : -1});
    }
    const Tensor input = tokens(rank, count);
    const Dispatched got = layer.dispatch({.input = input, .expert_indices = indices(experts, 2)});
    EXPECT_EQ(got.descriptor->num_input_tokens_per_rank().at<std::int32_t>(2), 700);
    const Tensor sums = layer.combine({.expert_output = got.output}, *got.descriptor);
    for (std::int64_t t = 0; t < count; ++t) {
      const float value = input.view().at<float>(t, 0);
      EXPECT_EQ(sums.view().at<float>(t, 0), t < 256 || t >= 512 ? 2 * value : value) << t;
    }
  });
}

// Outputs without rows are tensors all the same.
TEST(Dispatch, NothingArrives) {
  run(2, kTwoRanks, [](AllToAll& layer, int rank) {
    const Tensor input = tokens(rank, rank),
                 routing = indices(
                     rank == 0 ? std::vector<std::int32_t>{} : std::vector<std::int32_t>{3, -1}, 2);
    const Tensor weights(DType::f32, {rank, 2});
    const Dispatched got = layer.dispatch(
        {.input = input, .expert_indices = routing, .weights = weights, .copy_out = true});
    EXPECT_EQ(got.output.size(0), rank);
    EXPECT_EQ(got.weights.view().rank(), 1);
    EXPECT_FALSE(got.scales.view().present());
    Tensor out(DType::f32, {rank, kHidden});
    const Tensor none = layer.combine({.expert_output = got.output, .out = out}, *got.descriptor);
    EXPECT_FALSE(none.view().present());
    EXPECT_THAT(first_column(out), Each(100));
  });
}

// Rows of 2^20 columns, of which 2,048 are 2^31 elements. Row r begins and ends with r % 251, which
// bf16 holds and which tells apart rows whose offsets agree in 31 or 32 bits.
constexpr std::int64_t kLong = std::int64_t{1} << 20;

float mark(std::int64_t row) { return float(row % 251); }
void write_mark(const TensorView& rows, std::int64_t row) {
  rows.at<BFloat16>(row, 0) = rows.at<BFloat16>(row, rows.size(1) - 1) = BFloat16(mark(row));
}
void expect_value(const ConstTensorView& rows, std::int64_t row, float value) {
  EXPECT_EQ(float(rows.at<BFloat16>(row, 0)), value) << "row " << row;
  EXPECT_EQ(float(rows.at<BFloat16>(row, rows.size(1) - 1)), value) << "row " << row;
}

// A layer of such rows on nodes of one rank; `tokens` of each.
constexpr Config with_long_rows(std::int64_t tokens, int topk, int experts) {
  return {.max_tokens = tokens,
          .hidden = kLong,
          .topk = topk,
          .experts = experts,
          .dtype = DType::bf16,
          .local_world_size = 1,
          .arena_rows = 1,
          .timeout = std::chrono::minutes(10)};  // a rank reads gigabytes between its calls
}

bool has_memory(std::int64_t gibibytes) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  gibibytes *= 6;  // shadows
#endif
  return memory_of_kind("MemAvailable", "/proc/meminfo") >> 20 >= gibibytes;
}

// 2,051 rows arrive, 4 GiB, and are summed where they lie: most of them the 32 pairs of 64 tokens,
// each of another expert, so that the rows of a token are far apart.
TEST(DispatchFar, RowsBeyondTwoToTheThirtyOneElements) {
  if (!has_memory(6)) GTEST_SKIP() << "too little memory";
  run(2, with_long_rows(65, 32, 64), [](AllToAll& layer, int rank) {
    const std::int64_t count = rank == 0 ? 65 : 0;
    const auto pairs = [](std::int64_t t) { return t < 64 ? 32 : 3; };
    Tensor input(DType::bf16, {count, kLong});
    std::vector<std::int32_t> experts;
    for (std::int64_t t = 0; t < count; ++t) {
      write_mark(input, t);
      for (int k = 0; k < 32; ++k) experts.push_back(k < pairs(t) ? 32 + k : -1);
    }
    Dispatched got = layer.dispatch({.input = input, .expert_indices = indices(experts, 32)});
    ASSERT_EQ(got.output.size(0), rank == 1 ? 64 * 32 + 3 : 0);
    std::int64_t row = 0;
    for (int k = 0; rank == 1 && k < 32; ++k) {
      for (std::int64_t t = 0; t < 65; ++t) {
        if (k < pairs(t)) expect_value(got.output, row++, mark(t));
      }
    }
    // A value of its own for each row whose offset passes 2^31.
    for (row = 2048; row < got.output.size(0); ++row) {
      got.output.view().at<BFloat16>(row, 0) = BFloat16(float(row - 2047) * 1024);
    }
    const Tensor sums = layer.combine({.expert_output = got.output}, *got.descriptor);
    for (std::int64_t t = 0; t < count; ++t) {
      float first = mark(t) * float(pairs(t));
      const float last = first;
      if (t >= 61 && t < 64) first += float(t - 60) * 1024 - mark(t);  // the last rows are theirs
      EXPECT_EQ(float(sums.view().at<BFloat16>(t, 0)), float(BFloat16(first))) << t;
      EXPECT_EQ(float(sums.view().at<BFloat16>(t, kLong - 1)), float(BFloat16(last))) << t;
    }
  });
}

// What node 1 sends begins behind the 1,025 tokens of node 0, so that its token 1,023 begins at
// 2^31 elements. Of input and what travels only the tokens that are sent take memory.
TEST(DispatchFar, TokensBetweenNodesBeyondTwoToTheThirtyOneElements) {
  if (!has_memory(10)) GTEST_SKIP() << "too little memory for an address range";
  constexpr std::int64_t kTokens = 1025;
  const std::shared_ptr<void> memory = testing::far_memory(kTokens * kLong * 2);
  const TensorView far(memory.get(), DType::bf16, {kTokens, kLong});
  const std::vector<std::int64_t> sent = {0, 5, 1022, 1023, 1024};
  for (const std::int64_t t : sent) write_mark(far, t);
  run(2, with_long_rows(kTokens, 1, 2), [&](AllToAll& layer, int rank) {
    std::vector<std::int32_t> experts(std::size_t(rank * kTokens), -1);
    for (const std::int64_t t : sent) {
      if (rank == 1) experts[std::size_t(t)] = 0;
    }
    const Dispatched got = layer.dispatch(
        {.input = far.slice(0, 0, rank * kTokens), .expert_indices = indices(experts, 1)});
    ASSERT_EQ(got.output.size(0), rank == 0 ? std::ssize(sent) : 0);
    for (std::int64_t row = 0; row < got.output.size(0); ++row) {
      expect_value(got.output, row, mark(sent[std::size_t(row)]));
    }
  });
}

// The caller's tensors, with more than 2^31 elements between two rows.
TEST(DispatchFar, StridesBeyondTwoToTheThirtyOneElements) {
  constexpr std::int64_t kStride = (std::int64_t{1} << 31) + 64;
  constexpr Config kFar{
      .max_tokens = 2, .hidden = kHidden, .topk = 1, .experts = 1, .dtype = DType::bf16};
  std::vector<std::shared_ptr<void>> memory;
  for (int i = 0; i < 5; ++i) memory.push_back(testing::far_memory(2 * kStride * 2));
  const auto rows = [&](int i) {
    return TensorView(memory[std::size_t(i)].get(), DType::bf16, {2, kHidden}, {kStride, 1});
  };
  const TensorView input = rows(0), arrived = rows(1), outputs = rows(2), bias = rows(3),
                   sums = rows(4);
  run(1, kFar, [&](AllToAll& layer, int) {
    for (std::int64_t t = 0; t < 2; ++t) {
      for (std::int64_t c = 0; c < kHidden; ++c) {
        input.at<BFloat16>(t, c) = BFloat16(float(1 + t));
        outputs.at<BFloat16>(t, c) = BFloat16(float(10 + t));
        bias.at<BFloat16>(t, c) = BFloat16(float(100 + t));
      }
    }
    const Dispatched got =
        layer.dispatch({.input = input, .expert_indices = indices({0, 0}, 1), .out = arrived});
    layer.combine({.expert_output = outputs, .bias = bias, .out = sums}, *got.descriptor);
    for (std::int64_t t = 0; t < 2; ++t) {
      expect_value(arrived, t, float(1 + t));
      expect_value(sums, t, float(110 + 2 * t));
    }
  });
}

}  // namespace
}  // namespace winnow::expert_parallel
