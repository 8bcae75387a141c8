// Tests of expert_parallel::AllToAll: the case table, hand-computed problems, mixtures of calls.
#include "winnow/expert_parallel/all_to_all/all_to_all.h"

#include <algorithm>
#include <thread>

#include "winnow/expert_parallel/testing/all_to_all_ranks.h"
#include "winnow/testing/expect.h"

namespace winnow::expert_parallel {
namespace {

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;

WINNOW_CASE_TABLE(AllToAllCases, "expert_parallel::all_to_all");

Tensor indices_of(std::initializer_list<std::initializer_list<std::int32_t>> rows, int topk) {
  Tensor result(DType::i32, {std::int64_t(rows.size()), topk});
  auto* next = static_cast<std::int32_t*>(result.data());
  for (const auto& row : rows) next = std::copy(row.begin(), row.end(), next);
  return result;
}

// Token t of rank r holds the number 100 * r + t in every column.
Tensor numbered_tokens(int rank, std::int64_t count, DType dtype = DType::f32) {
  Tensor result(dtype, {count, 8});
  for (std::int64_t t = 0; t < count; ++t) {
    for (int c = 0; c < 8; ++c) oracle::store(result, t, c, float(100 * rank + t));
  }
  return result;
}

// The number that all columns of each row hold.
std::vector<float> numbers(const ConstTensorView& rows) {
  std::vector<float> result;
  for (std::int64_t i = 0; i < rows.size(0); ++i) {
    result.push_back(oracle::element(rows, i, 0));
    for (int c = 1; c < 8; ++c) EXPECT_EQ(oracle::element(rows, i, c), result.back());
  }
  return result;
}

std::vector<std::int64_t> integers(const ConstTensorView& view) {
  std::vector<std::int64_t> result;
  for (const double value : testing::read(view)) result.push_back(std::int64_t(value));
  return result;
}

// Two ranks with two experts each, two pairs per token.
class TwoRanks : public ::testing::Test {
 protected:
  static constexpr Config kConfig{.max_tokens = 4,
                                  .hidden = 8,
                                  .topk = 2,
                                  .experts = 4,
                                  .dtype = DType::f32,
                                  .timeout = std::chrono::seconds(60)};
  TwoRanks() {
    indices_[0] = indices_of({{0, 3}, {2, 2}, {4, 1}}, 2);
    indices_[1] = indices_of({{1, 0}, {3, -1}}, 2);
    for (int r = 0; r < 2; ++r) input_[r] = numbered_tokens(r, indices_[r].size(0));
  }
  // Dispatches on both ranks; `change` may set more arguments.
  template <class Change>
  void dispatch(const Config& config, const Change& change) {
    layers_ = ranks_.layers(config);
    expect_all_return(ranks_.run([&](int r) {
      DispatchArgs args{.input = input_[r], .expert_indices = indices_[r]};
      change(r, args);
      got_[r] = layers_[std::size_t(r)]->dispatch(args);
    }));
  }
  void dispatch(const Config& config = kConfig) {
    dispatch(config, [](int, DispatchArgs&) {});
  }
  // Rank r's experts write rows[r][i] to every column of row i.
  std::vector<std::vector<float>> combine(std::vector<std::vector<float>> rows,
                                          bool weighted = false) {
    std::vector<std::vector<float>> sums(2);
    expect_all_return(ranks_.run([&](int r) {
      const TensorView buffer = layers_[std::size_t(r)]->combine_buffer(*got_[r].descriptor);
      for (std::int64_t i = 0; i < buffer.size(0); ++i) {
        for (int c = 0; c < 8; ++c) {
          oracle::store(buffer, i, c, rows[std::size_t(r)][std::size_t(i)]);
        }
      }
      sums[std::size_t(r)] = numbers(layers_[std::size_t(r)]->combine(
          {.expert_output = buffer, .weighted = weighted}, *got_[r].descriptor));
    }));
    return sums;
  }

  Ranks ranks_{2};
  std::vector<std::unique_ptr<AllToAll>> layers_;
  Tensor input_[2], indices_[2];
  Dispatched got_[2];
};

TEST_F(TwoRanks, RowsStandByExpertSourceTokenAndK) {
  dispatch();
  // Expert 0: token 0 of rank 0, token 0 of rank 1. Expert 1: token 2 of rank 0, token 0 of rank 1.
  EXPECT_THAT(numbers(got_[0].output), ElementsAre(0, 100, 2, 100));
  // Expert 2: token 1 of rank 0 twice. Expert 3: token 0 of rank 0, token 1 of rank 1.
  EXPECT_THAT(numbers(got_[1].output), ElementsAre(1, 1, 0, 101));
  EXPECT_THAT(integers(got_[1].descriptor->expert_offsets()), ElementsAre(0, 2, 4));
  EXPECT_THAT(integers(got_[0].descriptor->skipped_token_mapping_indices()),
              ElementsAre(0, 3, 2, 3));  // the first pair of rank 1's token 0 names expert 1
  EXPECT_THAT(integers(got_[0].descriptor->skipped_token_topk_mapping_indices()),
              ElementsAre(0, -1, -1, -1, -1, 2, 3, 1));
  EXPECT_THAT(integers(got_[0].descriptor->token_dst_scatter_idx()),
              ElementsAre(0, 2, 0, 1, -1, 2, -1, -1));
  EXPECT_THAT(integers(got_[0].descriptor->topk_indices()), ElementsAre(0, 3, 2, 2, 4, 1, -1, -1));
  EXPECT_THAT(integers(got_[1].descriptor->num_input_tokens_per_rank()), ElementsAre(3, 2));
}

TEST_F(TwoRanks, TokenMajorHasOneRowPerTokenAndRank) {
  dispatch(kConfig, [](int, DispatchArgs& args) { args.order = RowOrder::token_major; });
  EXPECT_THAT(numbers(got_[0].output), ElementsAre(0, 2, 100));
  EXPECT_THAT(integers(got_[0].expert_ids), ElementsAre(0, -1, -1, 1, 1, 0));
  EXPECT_THAT(numbers(got_[1].output), ElementsAre(0, 1, 101));
  EXPECT_THAT(integers(got_[1].expert_ids), ElementsAre(-1, 1, 0, 0, 1, -1));
  EXPECT_THAT(integers(got_[1].descriptor->expert_offsets()), ElementsAre(0, 2, 4));
}

TEST_F(TwoRanks, AlignmentPadsWithZeros) {
  dispatch(kConfig, [](int, DispatchArgs& args) { args.expert_alignment = 3; });
  EXPECT_THAT(numbers(got_[0].output), ElementsAre(0, 100, 0, 2, 100, 0));
  EXPECT_THAT(integers(got_[0].descriptor->expert_counts()), ElementsAre(2, 2));
  EXPECT_THAT(integers(got_[0].descriptor->expert_offsets()), ElementsAre(0, 3, 6));
}

TEST_F(TwoRanks, CombineAddsTheRowsOfEachToken) {
  for (const bool local : {false, true}) {
    Config config = kConfig;
    config.enable_local_combine = local;
    dispatch(config);
    const auto sums = combine({{1, 2, 4, 8}, {16, 32, 64, 128}});
    EXPECT_THAT(sums[0], ElementsAre(1 + 64, 16 + 32, 4));
    EXPECT_THAT(sums[1], ElementsAre(2 + 8, 128));
  }
}

// With a row stride of 0 a rank passes one row as all of its rows.
TEST_F(TwoRanks, CombineTakesOneRowForAll) {
  dispatch();
  std::vector<std::vector<float>> sums(2);
  expect_all_return(ranks_.run([&](int r) {
    Tensor row(DType::f32, {1, 8});
    std::ranges::fill(row.values<float>(), float(1 + 9 * r));
    sums[std::size_t(r)] = numbers(layers_[std::size_t(r)]->combine(
        {.expert_output = ConstTensorView(row.data(), DType::f32, {4, 8}, {0, 1})},
        *got_[r].descriptor));
  }));
  EXPECT_THAT(sums[0], ElementsAre(1 + 10, 10 + 10, 1));
  EXPECT_THAT(sums[1], ElementsAre(1 + 1, 10));
}

// In bf16, with 8 bits of mantissa, 256 + 1 is 256 and 256 + 1 + 1 is 258.
class Rounding : public TwoRanks {
 protected:
  // The sum of rank 0's token, whose two pairs are on rank `home` and have rows of 256 and 1, and a
  // bias of 1. Rank 1's token has no pairs.
  float sum(bool local_combine, int local_world_size, int home) {
    Config config = kConfig;
    config.dtype = DType::bf16;
    config.enable_local_combine = local_combine;
    config.local_world_size = local_world_size;
    indices_[0] = indices_of({{2 * home, 2 * home + 1}}, 2);
    indices_[1] = indices_of({{-1, -1}}, 2);
    for (int r = 0; r < 2; ++r) input_[r] = numbered_tokens(r, 1, DType::bf16);
    dispatch(config);
    Tensor rows(DType::bf16, {2, 8}), nothing(DType::bf16, {0, 8}), bias(DType::bf16, {1, 8});
    for (int c = 0; c < 8; ++c) {
      oracle::store(rows, 0, c, 256);
      oracle::store(rows, 1, c, 1);
      oracle::store(bias, 0, c, 1);
    }
    float result = 0;
    expect_all_return(ranks_.run([&](int r) {
      const Tensor sums = layers_[std::size_t(r)]->combine(
          {.expert_output = r == home ? rows : nothing, .bias = bias}, *got_[r].descriptor);
      if (r == 0) result = numbers(sums).at(0);
    }));
    return result;
  }
};

TEST_F(Rounding, HappensOnceWithinANode) {
  EXPECT_EQ(sum(false, 2, 0), 258);
  EXPECT_EQ(sum(false, 2, 1), 258);
}

TEST_F(Rounding, HappensWhereALocalSumCrossesToAnotherRank) {
  EXPECT_EQ(sum(true, 2, 0), 258);
  EXPECT_EQ(sum(true, 2, 1), 256);  // (256 + 1 = 256) + 1 = 256
}

TEST_F(Rounding, HappensWhereANodeSumCrossesToAnotherNode) {
  EXPECT_EQ(sum(false, 1, 0), 258);
  EXPECT_EQ(sum(false, 1, 1), 256);
}

TEST_F(TwoRanks, WeightsStayOneDimensionalWhenTheArenaGrows) {
  Config config = kConfig;
  config.arena_rows = 1;
  const std::vector<std::unique_ptr<AllToAll>> layers = ranks_.layers(config);
  for (int again = 0; again < 3; ++again) {
    expect_all_return(ranks_.run([&](int r) {
      Tensor weights(DType::f32, {input_[r].size(0), 2});
      for (std::int64_t i = 0; i < weights.numel(); ++i) {
        weights.values<float>()[std::size_t(i)] = float(10 * r + i);
      }
      got_[r] = layers[std::size_t(r)]->dispatch(
          {.input = input_[r], .expert_indices = indices_[r], .weights = weights});
    }));
    ASSERT_EQ(got_[0].weights.view().rank(), 1);
    EXPECT_THAT(got_[0].weights.values<float>(), ElementsAre(0, 11, 5, 10));
    EXPECT_THAT(got_[1].weights.values<float>(), ElementsAre(2, 3, 1, 12));
  }
}

// Several descriptors are alive at once, and are used and destroyed in any order.
TEST(AllToAll, CombinesInAnyOrder) {
  for (const auto& [nodes, local] : {std::pair{1, 3}, std::pair{2, 2}}) {
    Problem problem{.name = "any-order",
                    .nodes = nodes,
                    .local_world_size = local,
                    .choice = ExpertChoice::dropped,
                    .weights = true,
                    .weighted_combine = true,
                    .rounds = 6};
    const std::vector<Round> rounds = make_rounds(problem);
    const Ranks ranks(problem.world_size());
    const auto layers = ranks.layers(problem.config());
    expect_all_return(ranks.run([&](int rank) {
      AllToAll& layer = *layers[std::size_t(rank)];
      Comparisons mine;
      std::vector<Dispatched> alive;
      for (const Round& round : rounds) {
        alive.push_back(dispatch_and_check(layer, kHere, problem, round, rank, nullptr, mine));
      }
      for (const std::size_t i : {3u, 0u, 5u, 1u, 4u, 2u, 3u}) {
        combine_and_check(layer, kHere, problem, rounds[i], rank, alive[i], mine);
        if (i == 0 || i == 5) alive[i] = {};
        if (i != 5) continue;
        // These two reuse the memory of the destroyed ones.
        alive[5] = dispatch_and_check(layer, kHere, problem, rounds[5], rank, nullptr, mine);
        alive[0] = dispatch_and_check(layer, kHere, problem, rounds[0], rank, nullptr, mine);
        check_dispatched(kHere, problem, rounds[4], rank, alive[4], mine);
      }
      expect_passed(mine);
    }));
  }
}

// A counted call must not use the count that an earlier worst-case call sent.
TEST(AllToAll, MixesWorstCaseAndCountedCalls) {
  Problem problem{.name = "mixed",
                  .nodes = 2,
                  .local_world_size = 2,
                  .choice = ExpertChoice::dropped,
                  .weights = true,
                  .rounds = 12};
  const std::vector<Round> rounds = make_rounds(problem);
  const Ranks ranks(problem.world_size());
  const auto layers = ranks.layers(problem.config());
  expect_all_return(ranks.run([&](int rank) {
    Comparisons mine;
    for (std::size_t i = 0; i < rounds.size(); ++i) {
      Problem one = problem;
      one.mode = i % 3 == 1 ? Mode::counted : Mode::worst_case;
      one.token_major = false;
      const Dispatched got = dispatch_and_check(*layers[std::size_t(rank)], kHere, one, rounds[i],
                                                rank, nullptr, mine);
      if (i % 2 == 0) {
        combine_and_check(*layers[std::size_t(rank)], kHere, one, rounds[i], rank, got, mine);
      }
    }
    expect_passed(mine);
  }));
}

TEST(AllToAll, TwoLayersOnOneTransportAreIndependent) {
  Problem first{.name = "first", .nodes = 2, .local_world_size = 2, .weights = true, .rounds = 5};
  Problem second{.name = "second",
                 .dtype = DType::f32,
                 .nodes = 1,
                 .local_world_size = 4,
                 .experts_per_rank = 2,
                 .topk = 3,
                 .max_tokens = 30,
                 .hidden = 16,
                 .choice = ExpertChoice::duplicates,
                 .token_major = true,
                 .rounds = 5};
  const std::vector<Round> rounds[2] = {make_rounds(first), make_rounds(second)};
  const Ranks ranks(4);
  const auto layers_a = ranks.layers(first.config()), layers_b = ranks.layers(second.config());
  expect_all_return(ranks.run([&](int rank) {
    AllToAll &a = *layers_a[std::size_t(rank)], &b = *layers_b[std::size_t(rank)];
    Comparisons mine;
    for (std::size_t i = 0; i < 5; ++i) {
      const Dispatched x = dispatch_and_check(a, kHere, first, rounds[0][i], rank, nullptr, mine);
      const Dispatched y = dispatch_and_check(b, kHere, second, rounds[1][i], rank, nullptr, mine);
      combine_and_check(a, kHere, first, rounds[0][i], rank, x, mine);
      combine_and_check(b, kHere, second, rounds[1][i], rank, y, mine);
    }
    expect_passed(mine);
  }));
}

// 20 repeats with random delays give the same bits: the order of arrival has no effect.
TEST(AllToAll, ResultsDoNotDependOnTiming) {
  Problem problem{.name = "timing",
                  .nodes = 2,
                  .local_world_size = 2,
                  .topk = 6,
                  .hidden = 8,
                  .choice = ExpertChoice::duplicates,
                  .weights = true,
                  .weighted_combine = true,
                  .rounds = 1};
  const std::vector<Round> rounds = make_rounds(problem);
  const Ranks ranks(problem.world_size());
  const auto layers = ranks.layers(problem.config());
  expect_all_return(ranks.run([&](int rank) {
    testing::Random random{std::uint64_t(rank)};
    Comparisons mine;
    for (int again = 0; again < 20; ++again) {
      std::this_thread::sleep_for(std::chrono::microseconds(random.below(3000)));
      const Dispatched got = dispatch_and_check(*layers[std::size_t(rank)], kHere, problem,
                                                rounds[0], rank, nullptr, mine);
      std::this_thread::sleep_for(std::chrono::microseconds(random.below(3000)));
      combine_and_check(*layers[std::size_t(rank)], kHere, problem, rounds[0], rank, got, mine);
    }
    expect_passed(mine);
  }));
}

TEST_F(TwoRanks, OutputsOutliveTheLayer) {
  dispatch();
  layers_.clear();
  EXPECT_THAT(numbers(got_[0].output), ElementsAre(0, 100, 2, 100));
  EXPECT_THAT(integers(got_[1].descriptor->expert_offsets()), ElementsAre(0, 2, 4));
}

TEST_F(TwoRanks, TheArenaIsReused) {
  const auto layers = ranks_.layers(kConfig);
  std::int64_t bytes = 0;
  for (int again = 0; again < 50; ++again) {
    expect_all_return(ranks_.run([&](int r) {
      got_[r] = layers[std::size_t(r)]->dispatch(
          {.input = input_[r], .expert_indices = indices_[r], .copy_out = again % 2 == 1});
    }));
    if (again == 4) bytes = layers[0]->arena_bytes();
  }
  EXPECT_EQ(layers[0]->arena_bytes(), bytes);
}

}  // namespace
}  // namespace winnow::expert_parallel
