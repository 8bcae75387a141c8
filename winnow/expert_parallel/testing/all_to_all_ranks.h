// What the tests of the all-to-all share: a world of threads on the CPU or on one GPU, what they
// give to a dispatch, and how each rank's call ended. Only for tests: needs GoogleTest.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "winnow/core/device_memory.h"
#include "winnow/core/error.h"
#include "winnow/expert_parallel/all_to_all/all_to_all.h"
#include "winnow/expert_parallel/testing/all_to_all_check.h"
#include "winnow/expert_parallel/testing/rank_device.h"
#include "winnow/expert_parallel/testing/ranks.h"
#include "winnow/testing/expect.h"

namespace winnow::expert_parallel {

inline double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

inline const RankDevice kHere;  // the CPU

using Layers = std::vector<std::unique_ptr<AllToAll>>;  // of every rank

// How a call ended.
struct Outcome {
  std::optional<ErrorCode> code;  // absent: it returned
  std::string text, argument;     // what() of the error, and what it names
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
    outcome.argument = error.argument();
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
      if (outcome.code) throw std::runtime_error(outcome.text);  // no test goes on without them
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

// A timeout within `seconds`, whose text has `part`.
inline void expect_timeout(const Outcome& outcome, const std::string& part, double seconds) {
  EXPECT_EQ(outcome.code, ErrorCode::timeout) << outcome.text;
  EXPECT_THAT(outcome.text, ::testing::HasSubstr(part));
  EXPECT_LT(outcome.seconds, seconds);
}

inline void expect_passed(const Comparisons& comparisons) {
  testing::expect_passed(comparisons.list());
}

// Runs one round of `problem` on existing layers, to check that they work.
inline void expect_works(const Ranks& ranks, const Layers& layers, Problem problem) {
  problem.nodes = layers[0]->topology().nodes();
  problem.local_world_size = layers[0]->topology().local_world_size;
  const std::vector<Round> rounds = make_rounds(problem);
  expect_all_return(ranks.run([&](int rank) {
    SCOPED_TRACE("rank " + std::to_string(rank));
    expect_passed(run_rank(*layers[std::size_t(rank)], problem, rounds));
  }));
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

inline Config on(Device device, Config config) {
  config.device = device;
  return config;
}

// What a rank gives to a dispatch of that configuration: n tokens, pair i to expert + i * step.
struct Given {
  Tensor input, indices, weights;
  DispatchArgs args;

  explicit Given(const RankDevice& place, std::int64_t n = 3, std::int32_t expert = 0,
                 std::int32_t step = 0)
      : input(place.copy(Tensor(DType::f32, {n, 16}))),
        weights(place.copy(Tensor(DType::f32, {n, 2}))),
        place_(&place) {
    Tensor experts(DType::i32, {n, 2});
    for (std::int32_t& index : experts.values<std::int32_t>()) {
      index = expert;
      expert += step;
    }
    indices = place.copy(experts);
    args.input = input;
    args.expert_indices = indices;
    args.stream = place.stream();
  }
  // Sets the expert of one pair.
  void choose(std::int64_t token, std::int64_t k, std::int32_t expert) {
    Tensor one(DType::i32, {1, 1});
    one.view().at<std::int32_t>(0, 0) = expert;
    place_->write(indices.view().slice(0, token, token + 1).slice(1, k, k + 1), one);
    place_->wait();
  }

 private:
  const RankDevice* place_;
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

// A world whose ranks are all on one device, each with a place of its own and a layer.
class World {
 public:
  World(Device device, int world_size)
      : device_(device), ranks_(world_size), given_(std::size_t(world_size)) {}
  World(Device device, const Config& config, int world_size) : World(device, world_size) {
    make(config);
  }
  // Makes new places and layers.
  void make(const Config& config) {
    places_.clear();
    for (int rank = 0; rank < ranks_.size(); ++rank) {
      places_.push_back(std::make_unique<RankDevice>(device_));
    }
    layers_ = ranks_.layers(on(device_, config));
  }

  const Ranks& ranks() const { return ranks_; }
  const Layers& layers() const { return layers_; }
  AllToAll& layer(int rank) const { return *layers_[std::size_t(rank)]; }
  const RankDevice& place(int rank) const { return *places_[std::size_t(rank)]; }
  // Given(place, what...), which is kept until the rank gives something else.
  template <class... What>
  Given& give(int rank, const What&... what) {
    std::optional<Given>& given = given_[std::size_t(rank)];
    given = Given(place(rank), what...);
    return *given;
  }

  const Given& given(int rank) const { return *given_[std::size_t(rank)]; }

  template <class Body>
  std::vector<Outcome> run(const Body& body) const {
    return ranks_.run([&](int rank) {
      const DeviceGuard guard(device_);
      body(rank);
    });
  }
  // Every rank dispatches after change(rank, given) has changed what it gives, and waits for its
  // kernels.
  template <class Change>
  std::vector<Outcome> dispatch(const Change& change, std::vector<Dispatched>* results = nullptr) {
    return run([&](int rank) {
      Given& given = give(rank);
      change(rank, given);
      Dispatched result = layer(rank).dispatch(given.args);
      place(rank).wait();
      if (results != nullptr) (*results)[std::size_t(rank)] = std::move(result);
    });
  }
  // The same, which must succeed; returns the ranks' results.
  template <class Change>
  std::vector<Dispatched> dispatched(const Change& change) {
    std::vector<Dispatched> results(layers_.size());
    expect_all_return(dispatch(change, &results));
    return results;
  }
  // Every rank waits for its kernels, calls a barrier, and waits for that.
  std::vector<Outcome> barrier(bool intra_node_only = false) const {
    return run([&](int rank) {
      place(rank).wait();
      layer(rank).barrier(intra_node_only, place(rank).stream());
      place(rank).wait();
    });
  }

 private:
  Device device_;
  Ranks ranks_;
  std::vector<std::unique_ptr<RankDevice>> places_;
  std::vector<std::optional<Given>> given_;
  Layers layers_;
};

inline void expect_working(const World& world) { expect_working(world.ranks(), world.layers()); }

}  // namespace winnow::expert_parallel
