// expert_parallel::AllToAll: ranks that come late or never, and the life of layers. Every rank is a
// thread; all_to_all_processes_test.cc kills and stops processes.
#include <algorithm>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "winnow/expert_parallel/all_to_all_test_ranks.h"
#include "winnow/expert_parallel/testing/leftovers.h"
#include "winnow/testing/generate.h"

namespace winnow::expert_parallel {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

constexpr double kSlack = 5;  // seconds that a busy machine may add to a deadline

// Ranks that do not come.

class Absence : public ::testing::Test {
 protected:
  static constexpr milliseconds kTimeout{400};
  static constexpr double kInTime = 0.4 + kSlack;

  void make_layers(int nodes = 1) {
    Config config = small_config(4, kTimeout);
    config.local_world_size = 4 / nodes;
    layers_ = ranks_.layers(config);
  }
  AllToAll& layer(int rank) { return *layers_[std::size_t(rank)]; }

  // `call` on all ranks but 2, which comes when the others have given up: everyone gets an error
  // that names rank 2, later calls fail at once, and a new layer works.
  template <class Call>
  void expect_named(const std::string& operation, const Call& call) {
    const auto outcomes = ranks_.run([&](int rank) {
      if (rank == 2) std::this_thread::sleep_for(3 * kTimeout);
      call(rank);
    });
    for (int rank = 0; rank < 4; ++rank) {
      const Outcome& outcome = outcomes[std::size_t(rank)];
      expect_timeout(outcome, "rank 2", rank == 2 ? 10 : kInTime);
      EXPECT_THAT(outcome.text, ::testing::StartsWith("expert_parallel::" + operation + ": "));
    }
    for (const Outcome& outcome : ranks_.run([&](int rank) {
           Given given;
           layer(rank).dispatch(given.args);
         })) {
      expect_timeout(outcome, "rank 2", 0.3);
    }
    const auto start = std::chrono::steady_clock::now();
    for (const auto& one : layers_) one->close();
    layers_.clear();
    EXPECT_LT(seconds_since(start), 2);
    expect_working(ranks_, ranks_.layers(small_config(4)));
  }

  Ranks ranks_{4};
  Layers layers_;
};

TEST_F(Absence, AtCreation) {
  const auto outcomes = ranks_.run([&](int rank) {
    if (rank == 2) std::this_thread::sleep_for(3 * kTimeout);
    ranks_.layer(rank, small_config(4, kTimeout));
  });
  for (const int rank : {0, 1, 3}) {
    expect_timeout(outcomes[std::size_t(rank)], "rank 2", kInTime);
  }
  EXPECT_EQ(outcomes[2].code, ErrorCode::timeout) << outcomes[2].text;
  EXPECT_LT(outcomes[2].seconds, 1.2 + kInTime);
  Ranks anew(4);
  expect_working(anew, anew.layers(small_config(4)));
}

TEST_F(Absence, OfEverybodyElseAtCreation) {
  const Outcome outcome = outcome_of([&] { ranks_.layer(0, small_config(4, kTimeout)); });
  expect_timeout(outcome, "1", kInTime);
  EXPECT_THAT(outcome.text, HasSubstr("expert_parallel::AllToAll: "));
  EXPECT_THAT(outcome.text, HasSubstr("3"));
}

TEST_F(Absence, AtDispatch) {
  for (const int nodes : {1, 2, 4}) {
    SCOPED_TRACE(nodes);
    make_layers(nodes);
    expect_named("dispatch", [&](int rank) {
      Given given(3, 1);
      layer(rank).dispatch(given.args);
    });
  }
}

TEST_F(Absence, AtCombine) {
  for (const int nodes : {1, 2, 4}) {
    SCOPED_TRACE(nodes);
    make_layers(nodes);
    std::vector<Dispatched> got(4);
    expect_all_return(ranks_.run([&](int rank) {
      Tensor input(DType::f32, {4, 16}), indices(DType::i32, {4, 2});
      for (int i = 0; i < 8; ++i) indices.values<std::int32_t>()[std::size_t(i)] = i;
      got[std::size_t(rank)] = layer(rank).dispatch({.input = input, .expert_indices = indices});
    }));
    expect_named("combine", [&](int rank) {
      const Descriptor& descriptor = *got[std::size_t(rank)].descriptor;
      layer(rank).combine({.expert_output = layer(rank).combine_buffer(descriptor)}, descriptor);
    });
  }
}

TEST_F(Absence, AtBarrier) {
  make_layers();
  expect_named("barrier", [&](int rank) { layer(rank).barrier(); });
  make_layers();
  expect_named("barrier", [&](int rank) { layer(rank).barrier(true); });
}

TEST_F(Absence, BecauseTheRankHasClosed) {
  make_layers();
  layer(2).close();
  const auto outcomes = ranks_.run([&](int rank) {
    if (rank == 2) return;
    Given given;
    layer(rank).dispatch(given.args);
  });
  for (const int rank : {0, 1, 3}) {
    expect_timeout(outcomes[std::size_t(rank)], "rank 2", kInTime);
  }
}

TEST_F(Absence, AtClose) {
  make_layers();
  const auto outcomes = ranks_.run([&](int rank) {
    if (rank != 2) layer(rank).close();
  });
  for (const Outcome& outcome : outcomes) EXPECT_LT(outcome.seconds, kInTime);
}

// Slower than all the others by far, but in time.
TEST(Stragglers, AreWaitedFor) {
  const Ranks ranks(3);
  const Layers layers = ranks.layers(small_config(3));
  expect_all_return(ranks.run([&](int rank) {
    std::this_thread::sleep_for(milliseconds(rank == 1 ? 300 : 0));
    Given given;
    const Dispatched got = layers[std::size_t(rank)]->dispatch(given.args);
    std::this_thread::sleep_for(milliseconds(rank == 2 ? 300 : 0));
    layers[std::size_t(rank)]->combine(
        {.expert_output = layers[std::size_t(rank)]->combine_buffer(*got.descriptor)},
        *got.descriptor);
  }));
  expect_working(ranks, layers);
}

// Lives of layers.

TEST(Lifecycle, AClosedLayerSaysSo) {
  const Ranks ranks(2);
  const Layers layers = ranks.layers(small_config(2));
  std::vector<Dispatched> got(2);
  expect_all_return(ranks.run([&](int rank) {
    Given given;
    got[std::size_t(rank)] = layers[std::size_t(rank)]->dispatch(given.args);
  }));
  for (const auto& layer : layers) {
    layer->close();
    layer->close();
  }
  const auto expect_closed = [](const std::string& operation, const auto& call) {
    const Outcome outcome = outcome_of(call);
    EXPECT_EQ(outcome.code, ErrorCode::invalid_argument);
    EXPECT_EQ(outcome.text, "expert_parallel::" + operation + ": the layer is closed");
  };
  const Tensor rows(DType::f32, {12, 16});
  expect_closed("dispatch", [&] { layers[0]->dispatch(Given().args); });
  expect_closed("combine",
                [&] { layers[0]->combine({.expert_output = rows}, *got[0].descriptor); });
  expect_closed("barrier", [&] { layers[1]->barrier(); });
  EXPECT_EQ(layers[1]->rank(), 1);
  EXPECT_EQ(layers[0]->config().experts, 4);
}

TEST(Lifecycle, DescriptorsAndOutputsMayGoInAnyOrder) {
  std::vector<Dispatched> got(2);
  {
    const Ranks ranks(2);
    Layers layers = ranks.layers(small_config(2));
    expect_all_return(ranks.run([&](int rank) {
      Given given;
      got[std::size_t(rank)] = layers[std::size_t(rank)]->dispatch(given.args);
    }));
    got[1].descriptor.reset();
    layers[0].reset();
    got[0].output = {};
    layers[1].reset();
  }
  EXPECT_EQ(got[0].descriptor->rows(), 12);
  testing::fill(got[1].output.view(), 7);
}

// Outputs and descriptors go whenever their last owner lets go, also while a dispatch is under way.
TEST(Lifecycle, OtherThreadsMayFreeOutputs) {
  const Ranks ranks(3);
  const Layers layers = ranks.layers(small_config(3, milliseconds(10000)));
  expect_all_return(ranks.run([&](int rank) {
    std::mutex mutex;
    std::vector<Dispatched> kept;
    bool ended = false;
    std::thread other([&] {
      for (bool more = true; more; std::this_thread::yield()) {
        const std::lock_guard lock(mutex);
        more = !ended;
        // The newest is the one beside the hole that the next dispatch has been offered.
        if (!kept.empty()) kept.pop_back();
      }
    });
    const Outcome outcome = outcome_of([&] {
      for (int i = 0; i < 1000; ++i) {
        Given given(1 + i % 4, i % 6);
        Dispatched got = layers[std::size_t(rank)]->dispatch(given.args);
        const std::lock_guard lock(mutex);
        kept.push_back(std::move(got));
      }
    });
    {
      const std::lock_guard lock(mutex);
      ended = true;
    }
    other.join();
    EXPECT_EQ(outcome.text, "");
  }));
  expect_working(ranks, layers);
}

TEST(Lifecycle, DestroyedWithoutUse) {
  const Ranks ranks(4);
  for (int again = 0; again < 3; ++again) ranks.layers(small_config(4));
}

TEST(Lifecycle, AHundredLayersLeaveNothing) {
  const auto make_and_use = [](int times) {
    for (int i = 0; i < times; ++i) {
      const Ranks ranks(3);
      const Layers layers = ranks.layers(small_config(3));
      expect_all_return(ranks.run([&](int rank) {
        Given given;
        const Dispatched got = layers[std::size_t(rank)]->dispatch(given.args);
      }));
    }
  };
  make_and_use(10);
  const int files = open_files(), maps = mappings();
  make_and_use(100);
  EXPECT_EQ(open_files(), files);
  EXPECT_LE(mappings(), maps + 8);  // the allocator's own
}

}  // namespace
}  // namespace winnow::expert_parallel
