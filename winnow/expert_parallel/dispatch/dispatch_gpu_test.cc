// What dispatch's kernels do differently for some sizes: routings larger than shared memory, rows
// larger than a stage or not aligned, rows repeated while others arrive. The oracle is that of the
// case table. Skipped without a GPU.

#include "winnow/expert_parallel/testing/gpu_ranks.h"

namespace winnow::expert_parallel {
namespace {

using DispatchGpu = GpuTest;

// Neither the counters of a warp nor the first rows of all experts fit into shared memory.
TEST_F(DispatchGpu, MoreExpertsThanSharedMemoryCounts) {
  Problem problem{.experts_per_rank = 16000, .topk = 8, .max_tokens = 300};
  expect_as_oracle(problem);
  problem.nodes = 2;
  problem.local_world_size = 2;
  problem.token_major = true;
  expect_as_oracle(problem);
}

// 80,016 bytes: several stages for a row.
TEST_F(DispatchGpu, RowsInPieces) {
  for (const bool strided : {false, true}) {
    expect_as_oracle({.dtype = DType::f32,
                      .topk = 5,
                      .hidden = 20004,
                      .alignment = 4,
                      .choice = ExpertChoice::duplicates,
                      .mode = Mode::cached,
                      .strided = strided,
                      .rounds = 3});
  }
}

// Rows of 16 bytes, more of them under way than there are stages.
TEST_F(DispatchGpu, TinyRows) {
  expect_as_oracle({.topk = 8, .max_tokens = 3000, .hidden = 8, .choice = ExpertChoice::dropped});
}

// Enough tokens that every phase of a repeated routing has rows to be made.
TEST_F(DispatchGpu, RowsMadeWhileOthersArrive) {
  for (const int nodes : {1, 2}) {
    for (const Tokens tokens : {Tokens::full, Tokens::uneven, Tokens::even_ranks_empty}) {
      expect_as_oracle({.nodes = nodes,
                        .local_world_size = 4 / nodes,
                        .experts_per_rank = 4,
                        .topk = 9,
                        .max_tokens = 700,
                        .hidden = 512,
                        .alignment = 8,
                        .tokens = tokens,
                        .choice = ExpertChoice::duplicates,
                        .mode = Mode::cached,
                        .weights = true,
                        .fp8 = true,
                        .rounds = 4});
    }
  }
}

TEST_F(DispatchGpu, ThirtyTwoPairsOfAToken) {
  expect_as_oracle({.experts_per_rank = 9,
                    .topk = 32,
                    .max_tokens = 270,
                    .choice = ExpertChoice::dropped,
                    .weights = true});
}

// As many blocks as chunks, or fewer: a block sends and forwards several.
TEST_F(DispatchGpu, FewSmsBetweenNodes) {
  for (const int sm_count : {1, 2, 3}) {
    for (const Mode mode : {Mode::counted, Mode::cached, Mode::worst_case}) {
      expect_as_oracle({.nodes = 2,
                        .local_world_size = 2,
                        .experts_per_rank = 9,
                        .topk = 20,
                        .max_tokens = 150,
                        .tokens = Tokens::full,
                        .choice = ExpertChoice::duplicates,
                        .mode = mode,
                        .weights = true,
                        .fp8 = true,
                        .strided = sm_count == 3,
                        .rounds = 3,
                        .sm_count = sm_count});
    }
  }
}

// The weights of one token may have any stride between rows, those of all may share a row.
TEST_F(DispatchGpu, WeightsOfAnyStrideInARepeatedRouting) {
  Config config = small_config(2);
  config.local_world_size = 1;  // they travel on the rail
  World world(kGpu, config, 2);
  for (const std::int64_t n : {1, 4}) {
    expect_all_return(world.run([&](int rank) {
      const RankDevice& place = world.place(rank);
      AllToAll& layer = world.layer(rank);
      Given given(place, n, 2 * (1 - rank));  // every pair to the other rank
      const float number = 1.0f + float(rank);
      Tensor weights(DType::f32, {n, 2});
      for (float& weight : weights.values<float>()) weight = number;
      given.weights = place.copy(weights);
      given.args.weights = given.weights;
      const Dispatched first = layer.dispatch(given.args);
      DispatchArgs again;
      again.input = given.input;
      again.weights = ConstTensorView(given.weights.data(), DType::f32, {n, 2}, {n == 1 ? 1 : 0, 1},
                                      place.device());
      again.cached = first.descriptor;
      again.stream = place.stream();
      const Tensor got = place.to_host(layer.dispatch(again).weights.view());
      EXPECT_EQ(got.size(0), 2 * n);
      for (const float weight : got.values<float>()) EXPECT_EQ(weight, 3.0f - number);
    }));
  }
}

// Of two pairs that name the same row the later one is at fault, whichever came first.
TEST_F(DispatchGpu, TheLaterOfTwoPairsOfARow) {
  World world(kGpu, small_config(2), 2);
  for (int attempt = 0; attempt < 5; ++attempt) {
    const auto outcomes = world.run([&](int rank) {
      const RankDevice& place = world.place(rank);
      Given given(place, 4, 1);  // every pair to rank 0
      Tensor rows(DType::i32, {4, 2});
      for (int i = 0; i < 8; ++i) rows.values<std::int32_t>()[std::size_t(i)] = 8 * rank + i;
      if (rank == 0) rows.values<std::int32_t>()[2] = 5;  // as token 2, k 1
      const Tensor scatter = place.copy(rows);
      given.args.scatter_indices = scatter;
      world.layer(rank).dispatch(given.args);
    });
    expect_all_refuse(
        outcomes,
        "expert_parallel::dispatch: rank 0: scatter_indices: want every row once, got "
        "row 5 again for token 2, k 1");
  }
}

}  // namespace
}  // namespace winnow::expert_parallel
