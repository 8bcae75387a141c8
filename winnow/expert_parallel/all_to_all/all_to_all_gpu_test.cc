// What only a GPU can show of the all-to-all beyond its case table: captured graphs, and refusals
// of calls for which no host waits. Every rank is a thread with a stream of its own, all on one
// GPU. Skipped without one.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "winnow/expert_parallel/testing/gpu_ranks.h"
#include "winnow/testing/gpu_test.h"

#if WINNOW_WITH_CUDA
#include <cuda_runtime_api.h>

namespace winnow::expert_parallel {
namespace {

using ::testing::HasSubstr;

cudaStream_t stream_of(const RankDevice& place) {
  return static_cast<cudaStream_t>(place.stream().handle);
}

constexpr cudaStreamCaptureMode kOfThisThread = cudaStreamCaptureModeThreadLocal;

// ---- Graphs.

// One rank's dispatch in the worst-case mode, experts that return what they get, and combine, in a
// graph whose tensors are written between launches.
class Recorded {
 public:
  Recorded(AllToAll& layer, const RankDevice& place, const Problem& problem, const Round& first,
           std::int64_t rows)
      : place_(place), rank_(layer.rank()) {
    const Round::Rank& mine = first.ranks[std::size_t(rank_)];
    input_ = place.copy(mine.input);
    indices_ = place.copy(mine.expert_indices);
    weights_ = place.copy(mine.weights);
    sums_ = place.make(problem.dtype, {{mine.input.size(0), problem.hidden}});
    const auto body = [&] {
      DispatchArgs args;
      args.input = input_;
      args.expert_indices = indices_;
      args.weights = weights_;
      args.order = problem.token_major ? RowOrder::token_major : RowOrder::expert_major;
      args.worst_case_rows = rows;
      args.stream = place.stream();
      dispatched_ = layer.dispatch(args);
      const TensorView buffer = layer.combine_buffer(*dispatched_.descriptor);
      check(cudaMemcpyAsync(buffer.data(), dispatched_.output.data(),
                            std::size_t(buffer.numel() * size_of(problem.dtype)),
                            cudaMemcpyDeviceToDevice, stream_of(place)));
      CombineArgs back;
      back.expert_output = buffer;
      back.weighted = problem.weighted_combine;
      back.out = sums_;
      back.stream = place.stream();
      layer.combine(back, *dispatched_.descriptor);
    };
    graph_ = std::make_unique<testing::Graph>(stream_of(place), body, kOfThisThread);
  }

  void launch(const Round& round) {
    const Round::Rank& mine = round.ranks[std::size_t(rank_)];
    place_.write(input_, mine.input);
    place_.write(indices_, mine.expert_indices);
    place_.write(weights_, mine.weights);
    graph_->launch(stream_of(place_));
    place_.wait();
  }
  void compare(const Round& round, bool weighted, Comparisons& comparisons) const {
    const auto head = [](const Tensor& all, std::int64_t rows) {
      return all.view().slice(0, 0, rows);
    };
    const Round::Rank& mine = round.ranks[std::size_t(rank_)];
    const auto& rows = round.rows[std::size_t(rank_)];
    const auto count = std::int64_t(rows.size());
    comparisons.add(compare_bits("output", head(place_.to_host(dispatched_.output.view()), count),
                                 oracle::gather(round.world, rows, &oracle::RankInput::input)));
    comparisons.add(compare_bits("weights", head(place_.to_host(dispatched_.weights.view()), count),
                                 oracle::gather_weights(round.world, rank_, rows)));
    std::vector<Tensor> outputs;
    std::vector<ConstTensorView> views;
    for (const auto& other : round.rows) {
      outputs.push_back(oracle::gather(round.world, other, &oracle::RankInput::input));
    }
    for (const Tensor& output : outputs) views.push_back(output);
    comparisons.add(compare_bits(
        "combine", place_.to_host(sums_.view()),
        oracle::combine(round.world, rank_, round.rows, views,
                        weighted ? mine.weights.view() : ConstTensorView(), false, {})));
  }

 private:
  const RankDevice& place_;
  int rank_;
  Tensor input_, indices_, weights_, sums_;
  Dispatched dispatched_;
  std::unique_ptr<testing::Graph> graph_;
};

Problem recorded_problem(int nodes, int locals) {
  return {.name = "graph",
          .nodes = nodes,
          .local_world_size = locals,
          .topk = 3,
          .max_tokens = 40,
          .hidden = 64,
          .arena_rows = 2000,
          .tokens = Tokens::full,
          .choice = ExpertChoice::dropped,
          .weights = true,
          .weighted_combine = true,
          .rounds = 5};
}

using Graphs = GpuTest;

TEST_F(Graphs, LaunchedAgainWithOtherIndices) {
  for (const auto& [nodes, locals] : {std::pair{1, 1}, {1, 2}, {1, 4}, {2, 2}, {4, 1}}) {
    for (const auto& [local_combine, token_major] :
         {std::pair{false, false}, {true, false}, {true, true}}) {
      SCOPED_TRACE(std::to_string(nodes) + " nodes of " + std::to_string(locals) +
                   (local_combine ? ", local combine" : "") + (token_major ? ", token-major" : ""));
      Problem problem = recorded_problem(nodes, locals);
      problem.local_combine = local_combine;
      problem.token_major = token_major;
      problem.weighted_combine = !token_major;
      const std::vector<Round> rounds = make_rounds(problem);
      std::int64_t rows = 5;
      for (const Round& round : rounds) rows = std::max(rows, round.most_rows() + 5);
      World world(kGpu, problem.config(), problem.world_size());
      expect_all_return(world.run([&](int rank) {
        Comparisons mine;
        Recorded recorded(world.layer(rank), world.place(rank), problem, rounds[0], rows);
        for (int pass = 0; pass < 2; ++pass) {
          for (const Round& round : rounds) {
            recorded.launch(round);
            recorded.compare(round, problem.weighted_combine, mine);
          }
        }
        expect_passed(mine);
        world.layer(rank).barrier(false, world.place(rank).stream());
      }));
      expect_works(world.ranks(), world.layers(),
                   {.topk = 3, .max_tokens = 40, .hidden = 64, .local_combine = local_combine});
    }
  }
}

TEST_F(Graphs, OverflowIsReportedByTheNextCall) {
  struct Shape {
    int nodes, locals;
    bool token_major;
  };
  for (const auto& [nodes, locals, token_major] :
       {Shape{1, 3, false}, {2, 2, false}, {1, 3, true}}) {
    SCOPED_TRACE(std::to_string(nodes) + (token_major ? ", token-major" : ""));
    Problem problem = recorded_problem(nodes, locals);
    problem.token_major = problem.local_combine = token_major;
    problem.weighted_combine = !token_major;
    const std::vector<Round> rounds = make_rounds(problem);
    World world(kGpu, problem.config(), problem.world_size());
    const std::int64_t rows = 20;  // far too few
    std::string expected;
    for (std::size_t rank = 0; rank < rounds[0].rows.size() && expected.empty(); ++rank) {
      const std::size_t wanted = rounds[0].rows[rank].size();
      if (wanted <= 20) continue;
      expected = "expert_parallel::barrier: rank " + std::to_string(rank) +
                 ": worst_case_rows: want " + std::to_string(wanted) + " or more, got 20";
    }
    ASSERT_NE(expected, "");
    std::vector<std::unique_ptr<Recorded>> recorded(rounds[0].rows.size());
    expect_all_return(world.run([&](int rank) {
      recorded[std::size_t(rank)] = std::make_unique<Recorded>(world.layer(rank), world.place(rank),
                                                               problem, rounds[0], rows);
      recorded[std::size_t(rank)]->launch(rounds[0]);
    }));
    expect_all_refuse(world.barrier(), expected);
    expect_all_return(world.barrier());
  }
}

TEST_F(Graphs, BadIndicesAreReportedByTheNextCall) {
  const Problem problem = recorded_problem(2, 2);
  std::vector<Round> rounds = make_rounds(problem);
  World world(kGpu, problem.config(), problem.world_size());
  std::vector<std::unique_ptr<Recorded>> recorded(rounds[0].rows.size());
  expect_all_return(world.run([&](int rank) {
    recorded[std::size_t(rank)] =
        std::make_unique<Recorded>(world.layer(rank), world.place(rank), problem, rounds[0], 500);
    Round bad = make_round(problem, 7, 8);
    bad.ranks[2].expert_indices.view().at<std::int32_t>(11, 1) = 1000;
    recorded[std::size_t(rank)]->launch(bad);
  }));
  expect_all_refuse(world.barrier(true),
                    "expert_parallel::barrier: rank 2: expert_indices: want -1 to " +
                        std::to_string(problem.experts()) + ", got 1000 for token 11");
  expect_all_return(world.run([&](int rank) {
    world.layer(rank).barrier(true, world.place(rank).stream());
    recorded[std::size_t(rank)]->launch(rounds[1]);
    Comparisons mine;
    recorded[std::size_t(rank)]->compare(rounds[1], true, mine);
    expect_passed(mine);
  }));
}

// Every rank's dispatch of `change`d arguments while its stream is recorded.
template <class Change>
std::vector<Outcome> record_dispatch(World& world, const Change& change) {
  std::vector<Outcome> outcomes(std::size_t(world.ranks().size()));
  expect_all_return(world.run([&](int rank) {
    Given given(world.place(rank));
    change(given.args);
    const cudaStream_t stream = stream_of(world.place(rank));
    check(cudaStreamBeginCapture(stream, kOfThisThread));
    outcomes[std::size_t(rank)] = outcome_of([&] { world.layer(rank).dispatch(given.args); });
    cudaGraph_t graph = nullptr;
    cudaStreamEndCapture(stream, &graph);
    if (graph != nullptr) cudaGraphDestroy(graph);
  }));
  return outcomes;
}

TEST_F(Graphs, CannotWaitForCounts) {
  World world(kGpu, small_config(2), 2);
  for (const Outcome& outcome : record_dispatch(world, [](DispatchArgs&) {})) {
    EXPECT_EQ(outcome.code, ErrorCode::invalid_argument) << outcome.text;
    EXPECT_THAT(outcome.text, HasSubstr("expert_parallel::dispatch: "));
    EXPECT_THAT(outcome.text, HasSubstr("worst_case_rows"));
  }
}

TEST_F(Graphs, AreRefusedByTheRankThatRecords) {
  Config config = small_config(2);
  config.arena_rows = 1000;
  World world(kGpu, config, 2);
  const auto outcomes = record_dispatch(world, [](DispatchArgs& args) {
    args.worst_case_rows = 30;
    args.input = {};
  });
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    EXPECT_THAT(outcomes[rank].text, HasSubstr("expert_parallel::dispatch: rank " +
                                               std::to_string(rank) + ": input: want"));
  }
  expect_working(world.ranks(), world.layers());
}

// ---- Refusals; all_to_all_refusals_test.cc has those that are alike on every device.

class GpuRefusals : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    Config config = small_config(3);
    config.arena_rows = 1000;  // no call waits for room
    world_.make(config);
  }
  void TearDown() override {
    if (!IsSkipped()) expect_working(world_);
  }
  World world_{kGpu, 3};
};

// Nobody has waited: the next call tells.
TEST_F(GpuRefusals, OptionsThatDifferWhereTheHostDoesNotWait) {
  for (int i = 0; i < 3; ++i) {
    expect_all_return(world_.dispatch(
        [](int rank, Given& given) { given.args.worst_case_rows = rank == 1 ? 20 : 30; }));
    expect_all_refuse(
        world_.barrier(),
        "expert_parallel::barrier: worst_case_rows differs: 30 on rank 0, 20 on rank 1");
    expect_all_return(world_.dispatch([](int, Given& given) { given.args.worst_case_rows = 30; }));
  }
}

// Ranks have taken other regions for the first call, so the second one, in which they throw, must
// move nothing either.
TEST_F(GpuRefusals, RegionsOfOtherSizesAreForgotten) {
  for (int i = 0; i < 3; ++i) {
    expect_all_return(world_.dispatch(
        [](int rank, Given& given) { given.args.worst_case_rows = rank == 1 ? 20 : 30; }));
    expect_all_refuse(
        world_.dispatch([](int, Given& given) { given.args.worst_case_rows = 30; }),
        "expert_parallel::dispatch: worst_case_rows differs: 30 on rank 0, 20 on rank 1");
    world_.barrier();  // tells of the second call, if nobody has yet
    world_.barrier();
    expect_working(world_);
  }
}

// A call in which all have learned where there is room lies between a refusal and its throw.
TEST_F(GpuRefusals, WhatWasLearnedSinceStays) {
  for (int i = 0; i < 3; ++i) {
    world_.dispatch([](int rank, Given& given) {
      given.args.worst_case_rows = 30;
      if (rank == 1) given.args.input = {};
    });
    const auto counted = world_.dispatch([](int, Given&) {});
    for (const std::size_t rank : {0, 2}) {
      EXPECT_THAT(counted[rank].text, HasSubstr("expert_parallel::dispatch: rank 1: input: want"));
    }
    EXPECT_EQ(counted[1].text, "");
    expect_all_return(world_.dispatch([](int, Given& given) { given.args.worst_case_rows = 30; }));
    expect_all_return(world_.barrier());
  }
}

// The rank at fault throws at once, the others when they have received.
TEST_F(GpuRefusals, ArgumentsOfOneRankWhereTheOthersDoNotWait) {
  for (int i = 0; i < 3; ++i) {
    const auto outcomes = world_.dispatch([](int rank, Given& given) {
      given.args.worst_case_rows = 30;
      if (rank == 1) given.args.input = {};
    });
    const auto later = world_.barrier();
    for (const std::size_t rank : {0, 2}) {
      EXPECT_EQ(outcomes[rank].text, "");
      EXPECT_THAT(later[rank].text, HasSubstr("expert_parallel::barrier: rank 1: input: want"));
    }
    EXPECT_THAT(outcomes[1].text, HasSubstr("expert_parallel::dispatch: rank 1: input: want"));
    EXPECT_EQ(later[1].text, "");
    expect_all_return(world_.dispatch([](int, Given& given) { given.args.worst_case_rows = 30; }));
  }
}

TEST_F(GpuRefusals, TheDefaultStreamOfASharedGpu) {
  for (const Outcome& outcome : world_.run([&](int rank) { world_.layer(rank).barrier(); })) {
    EXPECT_EQ(outcome.code, ErrorCode::invalid_argument);
    EXPECT_THAT(outcome.text, HasSubstr("expert_parallel::barrier: stream: want"));
  }
}

}  // namespace
}  // namespace winnow::expert_parallel

#endif
