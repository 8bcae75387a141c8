// What dispatch and combine do beyond moving rows: where memory comes from and goes, strided
// tensors, and the route between nodes in chunks. all_to_all_test.cc compares with the oracle.
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "winnow/expert_parallel/all_to_all.h"
#include "winnow/expert_parallel/testing/ranks.h"

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

TEST(Dispatch, TheExampleAndBackWithOnes) {
  run(2, kTwoRanks, [](AllToAll& layer, int rank) {
    const Tensor input = tokens(rank, rank == 0 ? 3 : 2);
    const Dispatched got =
        layer.dispatch({.input = input, .expert_indices = example_indices(rank)});
    if (rank == 0) {
      EXPECT_THAT(first_column(got.output), ElementsAre(0, 100, 2, 100));
    }
    if (rank == 1) {
      EXPECT_THAT(first_column(got.output), ElementsAre(1, 1, 0, 101));
    }
    const TensorView ones = layer.combine_buffer(*got.descriptor);
    for (std::int64_t i = 0; i < ones.numel(); ++i) static_cast<float*>(ones.data())[i] = 1;
    const Tensor sums = layer.combine({.expert_output = ones}, *got.descriptor);
    // As many as the token has kept pairs.
    if (rank == 0) {
      EXPECT_THAT(first_column(sums), ElementsAre(2, 2, 1));
    }
    if (rank == 1) {
      EXPECT_THAT(first_column(sums), ElementsAre(2, 1));
    }
  });
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

}  // namespace
}  // namespace winnow::expert_parallel
