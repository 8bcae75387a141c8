// What the tests of the all-to-all share: a world of threads, and what became of each rank's call.
// Only for tests: needs GoogleTest.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "winnow/core/error.h"
#include "winnow/expert_parallel/all_to_all.h"
#include "winnow/expert_parallel/all_to_all_check.h"
#include "winnow/expert_parallel/testing/ranks.h"
#include "winnow/testing/expect.h"

namespace winnow::expert_parallel {

inline double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

inline const Place kHere;  // the CPU

using Layers = std::vector<std::unique_ptr<AllToAll>>;  // of every rank

// How a call ended.
struct Outcome {
  std::optional<ErrorCode> code;  // absent: it returned
  std::string text;               // what() of the error
  double seconds = 0;
};

template <class Call>
Outcome outcome_of(const Call& call) {
  Outcome outcome;
  const auto start = std::chrono::steady_clock::now();
  try {
    call();
  } catch (const Error& error) {
    outcome.code = error.code();
    outcome.text = error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "not a winnow::Error: " << error.what();
  }
  outcome.seconds = seconds_since(start);
  return outcome;
}

// A world whose ranks are threads that stay from run to run.
class Ranks {
 public:
  explicit Ranks(int world_size) : team_(std::make_unique<RankTeam>(world_size)) {}
  int size() const { return team_->world().world_size(); }
  std::shared_ptr<Transport> transport(int rank) const { return team_->world().transport(rank); }
  std::shared_ptr<Store> store() const { return team_->world().store(); }
  // The rank's new layer. Collective.
  std::unique_ptr<AllToAll> layer(int rank, const Config& config) const {
    return std::make_unique<AllToAll>(transport(rank), store(), config);
  }

  // body(rank) on every rank; an Error that leaves it is the rank's outcome.
  template <class Body>
  std::vector<Outcome> run(const Body& body) const {
    std::vector<Outcome> outcomes(static_cast<std::size_t>(size()));
    const auto thrown = team_->try_run([&](int rank, const std::shared_ptr<Transport>&) {
      outcomes[std::size_t(rank)] = outcome_of([&] { body(rank); });
    });
    for (const std::exception_ptr& one : thrown) EXPECT_EQ(one, nullptr);
    return outcomes;
  }
  // A layer on every rank.
  Layers layers(const Config& config) const {
    Layers list(static_cast<std::size_t>(size()));
    for (const Outcome& outcome :
         run([&](int rank) { list[std::size_t(rank)] = layer(rank, config); })) {
      EXPECT_EQ(outcome.text, "");
    }
    return list;
  }

 private:
  std::unique_ptr<RankTeam> team_;
};

inline void expect_all_return(const std::vector<Outcome>& outcomes) {
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    EXPECT_EQ(outcomes[rank].text, "") << "rank " << rank;
  }
}

// Every rank throws this very error.
inline void expect_all_refuse(const std::vector<Outcome>& outcomes, const std::string& text) {
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    EXPECT_EQ(outcomes[rank].text, text) << "rank " << rank;
    EXPECT_EQ(outcomes[rank].code, ErrorCode::invalid_argument) << "rank " << rank;
  }
}

// A timeout in time, whose text has `part`.
inline void expect_timeout(const Outcome& outcome, const std::string& part, double seconds) {
  EXPECT_EQ(outcome.code, ErrorCode::timeout) << outcome.text;
  EXPECT_THAT(outcome.text, ::testing::HasSubstr(part));
  EXPECT_LT(outcome.seconds, seconds);
}

inline void expect_passed(const Comparisons& comparisons) {
  testing::expect_passed(comparisons.list());
}

// One round of `problem` on layers that are there, as a check that they work.
inline void expect_works(const Ranks& ranks, const Layers& layers, Problem problem) {
  problem.nodes = layers[0]->topology().nodes();
  problem.local_world_size = layers[0]->topology().local_world_size;
  const std::vector<Round> rounds = make_rounds(problem);
  std::vector<Comparisons> comparisons(layers.size());
  expect_all_return(ranks.run([&](int rank) {
    comparisons[std::size_t(rank)] = run_rank(*layers[std::size_t(rank)], problem, rounds);
  }));
  for (std::size_t rank = 0; rank < layers.size(); ++rank) {
    SCOPED_TRACE("rank " + std::to_string(rank));
    expect_passed(comparisons[rank]);
  }
}

// A small configuration: 4 tokens of 16 f32, 2 pairs each, 2 experts per rank, one node.
inline Config small_config(int world_size,
                           std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  return {.max_tokens = 4,
          .hidden = 16,
          .topk = 2,
          .experts = 2 * world_size,
          .dtype = DType::f32,
          .timeout = timeout};
}

// What a rank gives to a dispatch of that configuration: n tokens, every pair to one expert.
struct Given {
  Tensor input, indices, weights;
  DispatchArgs args;

  explicit Given(std::int64_t n = 3, std::int32_t expert = 0)
      : input(DType::f32, {n, 16}), indices(DType::i32, {n, 2}), weights(DType::f32, {n, 2}) {
    for (std::int32_t& index : indices.values<std::int32_t>()) index = expert;
    args.input = input;
    args.expert_indices = indices;
  }
};

// The layers of such a configuration do what the oracle says.
inline void expect_working(const Ranks& ranks, const Layers& layers) {
  const Config& config = layers[0]->config();
  expect_works(ranks, layers,
               {.name = "afterwards",
                .dtype = config.dtype,
                .experts_per_rank = config.experts / ranks.size(),
                .topk = config.topk,
                .max_tokens = config.max_tokens,
                .hidden = config.hidden,
                .choice = ExpertChoice::dropped,
                .weights = true});
}

}  // namespace winnow::expert_parallel
