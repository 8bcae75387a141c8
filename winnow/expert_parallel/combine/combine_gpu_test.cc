// What combine's kernels do differently for some sizes: rows cut into pieces, tokens with more rows
// than a ring has slots, tensors that are not aligned, sums of several nodes. The oracle is that of
// the case table. Skipped without a GPU.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "winnow/expert_parallel/testing/gpu_ranks.h"

namespace winnow::expert_parallel {
namespace {

using CombineGpu = GpuTest;

// body(rank, place, layer) on two ranks of small_config().
template <class Body>
void expect_two_ranks_return(bool local_combine, const Body& body) {
  Config config = small_config(2);
  config.enable_local_combine = local_combine;
  World world(kGpu, config, 2);
  expect_all_return(world.run([&](int rank) { body(rank, world.place(rank), world.layer(rank)); }));
}

// Every level of sums, of every dtype, with and without weights and bias, over several chunks of
// the rail; also where only the elements of rows are aligned.
TEST_F(CombineGpu, EveryLevelOfSums) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const int nodes : {1, 2, 4}) {
      for (const bool local : {false, true}) {
        for (const bool weighted : {false, true}) {
          expect_as_oracle({.dtype = dtype,
                            .nodes = nodes,
                            .local_world_size = 4 / nodes,
                            .topk = 7,
                            .max_tokens = 270,
                            .hidden = 136,
                            .choice = ExpertChoice::duplicates,
                            .local_combine = local,
                            .weights = weighted,
                            .weighted_combine = weighted,
                            .bias = weighted != local,
                            .strided = local});
        }
      }
    }
  }
}

// 80,016 bytes: several pieces for a row.
TEST_F(CombineGpu, RowsInPieces) {
  for (const int nodes : {1, 2}) {
    for (const bool strided : {false, true}) {
      expect_as_oracle({.dtype = DType::f32,
                        .nodes = nodes,
                        .local_world_size = 4 / nodes,
                        .topk = 5,
                        .hidden = 20004,
                        .choice = ExpertChoice::duplicates,
                        .expert_rows = strided ? ExpertRows::own : ExpertRows::in_place,
                        .local_combine = strided,
                        .weights = true,
                        .weighted_combine = true,
                        .bias = true,
                        .strided = strided});
    }
  }
}

// Token-major rows travel by pushes: more of them than are told of at a time, ranks that have many
// of them or none, those of other nodes' tokens.
TEST_F(CombineGpu, PushedRows) {
  for (const auto& [nodes, locals] : {std::pair{1, 2}, {1, 3}, {1, 4}, {2, 2}, {2, 3}}) {
    for (const ExpertChoice choice : {ExpertChoice::dropped, ExpertChoice::one_expert}) {
      for (const Mode mode : {Mode::counted, Mode::cached, Mode::worst_case}) {
        const bool own = mode == Mode::cached;
        expect_as_oracle({.nodes = nodes,
                          .local_world_size = locals,
                          .topk = 3,
                          .max_tokens = 270,
                          .hidden = 136,
                          .tokens = own ? Tokens::even_ranks_empty : Tokens::uneven,
                          .choice = choice,
                          .mode = mode,
                          .expert_rows = own ? ExpertRows::own : ExpertRows::combine_buffer,
                          .token_major = true,
                          .local_combine = true,
                          .bias = true,
                          .strided = own,
                          .sm_count = locals == 2 ? 24 : 20});
      }
    }
  }
}

TEST_F(CombineGpu, FewSmsReadRows) {
  for (const int nodes : {1, 2}) {
    expect_as_oracle({.nodes = nodes,
                      .local_world_size = 3,
                      .topk = 3,
                      .max_tokens = 270,
                      .hidden = 136,
                      .choice = ExpertChoice::dropped,
                      .token_major = true,
                      .local_combine = true,
                      .sm_count = 8});
  }
}

// Words and memory serve pushed rows and pushed sums in turn.
TEST_F(CombineGpu, RowsAndSumsOfOneLayer) {
  Problem problem{.topk = 3, .max_tokens = 100, .hidden = 136, .local_combine = true};
  World world(kGpu, problem.config(), 4);
  for (std::uint64_t call = 0; call < 12; ++call) {
    problem.seed = call;
    problem.token_major = call % 3 != 0;
    problem.mode = call % 2 == 0 ? Mode::counted : Mode::worst_case;
    expect_works(world.ranks(), world.layers(), problem);
  }
}

// Rows of 80,016 bytes, one behind the other or further apart.
TEST_F(CombineGpu, PushedRowsInPieces) {
  for (const bool strided : {false, true}) {
    expect_as_oracle({.dtype = DType::f32,
                      .topk = 5,
                      .max_tokens = 40,
                      .hidden = 20004,
                      .choice = ExpertChoice::duplicates,
                      .expert_rows = strided ? ExpertRows::own : ExpertRows::in_place,
                      .token_major = true,
                      .local_combine = true,
                      .strided = strided});
  }
}

// Token-major sums of every dtype, read and pushed, with rows of 16 bytes to 40 KB.
TEST_F(CombineGpu, TokenMajorSums) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const int nodes : {1, 2}) {
      for (const int sms : {8, 24}) {
        for (const auto& [hidden, tokens] : {std::pair{136, 270}, {8, 600}, {10008, 30}}) {
          expect_as_oracle({.dtype = dtype,
                            .nodes = nodes,
                            .local_world_size = 4 / nodes,
                            .topk = 7,
                            .max_tokens = tokens,
                            .hidden = hidden,
                            .choice = ExpertChoice::dropped,
                            .expert_rows = ExpertRows::own,
                            .token_major = true,
                            .local_combine = true,
                            .bias = sms == 8,
                            .strided = sms == 24,
                            .sm_count = sms});
        }
      }
    }
  }
}

// A ring holds fewer rows of 14 KB.
TEST_F(CombineGpu, ThirtyTwoRowsOfAToken) {
  for (const int nodes : {1, 2}) {
    for (const ExpertChoice choice : {ExpertChoice::dropped, ExpertChoice::one_expert}) {
      for (const bool local : {false, true}) {
        expect_as_oracle({.nodes = nodes,
                          .local_world_size = 4 / nodes,
                          .experts_per_rank = 9,
                          .topk = 32,
                          .max_tokens = 10,
                          .hidden = 7168,
                          .choice = choice,
                          .local_combine = local,
                          .weights = true,
                          .weighted_combine = true});
      }
    }
  }
}

// Rows of 16 bytes, and more tokens than turns.
TEST_F(CombineGpu, TinyRows) {
  for (const bool token_major : {false, true}) {
    expect_as_oracle({.topk = 4,
                      .max_tokens = 1000,
                      .hidden = 8,
                      .choice = ExpertChoice::dropped,
                      .token_major = token_major,
                      .bias = true});
  }
}

// Sums begin at +0, so that -0 does not come out of them, however few rows there are.
TEST_F(CombineGpu, ZerosArePositive) {
  for (const auto& [local, order] : {std::pair{false, RowOrder::expert_major},
                                     {true, RowOrder::expert_major},
                                     {false, RowOrder::token_major}}) {
    expect_two_ranks_return(local, [order](int, const RankDevice& place, AllToAll& layer) {
      Given given(place, 4, 1);  // every pair to rank 0, two of each token
      for (const int token : {0, 1}) given.choose(token, 0, 4);  // one is dropped
      given.args.order = order;
      const Dispatched dispatched = layer.dispatch(given.args);
      Tensor rows(DType::f32, {dispatched.output.size(0), 16});
      std::ranges::fill(rows.values<float>(), -0.0f);
      const Tensor experts = place.copy(rows);
      CombineArgs args;
      args.expert_output = experts;
      args.stream = place.stream();
      const Tensor sums = layer.combine(args, *dispatched.descriptor);
      const Tensor result = place.to_host(sums.view());
      EXPECT_EQ(result.size(0), 4);
      for (const float value : result.values<float>()) {
        EXPECT_EQ(value, 0.0f);
        EXPECT_FALSE(std::signbit(value));
      }
    });
  }
}

// One row stands for all: its stride is 0.
TEST_F(CombineGpu, OneRowForAll) {
  for (const bool local : {false, true}) {
    expect_two_ranks_return(local, [](int rank, const RankDevice& place, AllToAll& layer) {
      const Given given(place, 4, 2 * (1 - rank));  // every pair to the other rank
      const Dispatched dispatched = layer.dispatch(given.args);
      Tensor row(DType::f32, {1, 16});
      float number = float(1 + 100 * rank);
      for (float& value : row.values<float>()) value = number++;
      const Tensor expert = place.copy(row);
      CombineArgs args;
      args.expert_output =
          ConstTensorView(expert.data(), DType::f32, {8, 16}, {0, 1}, place.device());
      args.stream = place.stream();
      const Tensor sums = place.to_host(layer.combine(args, *dispatched.descriptor).view());
      for (std::int64_t i = 0; i < 4 * 16; ++i) {
        const float other = float(1 + 100 * (1 - rank) + i % 16);
        EXPECT_EQ(sums.values<float>()[std::size_t(i)], 2 * other);
      }
    });
  }
}

}  // namespace
}  // namespace winnow::expert_parallel
