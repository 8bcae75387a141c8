// Tests of expert_parallel::AllToAll with late and missing ranks, on every device, and of the
// lifetime of layers. Every rank is a thread; all_to_all_processes_test.cc kills and stops
// processes, all_to_all_faults_gpu_test.cc tests faults of kernels.
#include <latch>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "winnow/expert_parallel/notify/notify.h"
#include "winnow/expert_parallel/testing/all_to_all_ranks.h"
#include "winnow/expert_parallel/testing/leftovers.h"
#include "winnow/expert_parallel/testing/on_each_device.h"
#include "winnow/testing/generate.h"

namespace winnow::expert_parallel {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class Absence : public OnEachDevice {
 protected:
  void SetUp() override {
    OnEachDevice::SetUp();
    if (IsSkipped()) return;
    world_.make(small_config(4));  // loads the kernels, which takes longer than some waits
  }
  // Layers must be created in this time too, on a busy machine.
  static milliseconds timeout() { return milliseconds(on_gpu() ? 300 : 2000); }
  // Seconds, including delays of a busy machine.
  static constexpr double kInTime = 20;
  static Config config(int nodes = 1) {
    Config config = on(device(), small_config(4, timeout()));
    config.local_world_size = 4 / nodes;
    return config;
  }
  void dispatch(int rank, std::int64_t worst_case_rows = 0) {
    Given& given = world_.give(rank, 3, 1);
    given.args.worst_case_rows = worst_case_rows;
    world_.layer(rank).dispatch(given.args);
  }
  // Runs `call` on all ranks, on rank 2 when the others have given up.
  template <class Call>
  static std::vector<Outcome> without_rank_2(const Ranks& ranks, const Call& call) {
    std::vector<Outcome> outcomes(4);
    std::latch given_up(3);
    ranks.run([&](int rank) {
      if (rank == 2) given_up.wait();
      outcomes[std::size_t(rank)] = outcome_of([&] { call(rank); });
      if (rank != 2) given_up.count_down();
    });
    return outcomes;
  }
  // Every rank gets an error that names rank 2, later calls fail at once, and a new layer works.
  template <class Call>
  void expect_named(const std::string& operation, int nodes, const Call& call) {
    const auto outcomes = without_rank_2(world_.ranks(), [&](int rank) {
      call(rank);
      // On a GPU a later call throws the error.
      for (int later = 0; on_gpu() && later < 2; ++later) {
        world_.place(rank).wait();
        world_.layer(rank).barrier(true, world_.place(rank).stream());
      }
    });
    for (int rank = 0; rank < 4; ++rank) {
      SCOPED_TRACE(rank);
      const Outcome& outcome = outcomes[std::size_t(rank)];
      // Between nodes rank 2 on a GPU may name a rank that has given up.
      const std::string part = on_gpu() && nodes > 1 ? "of rank " : "of rank 2 (";
      expect_timeout(outcome, part, kInTime);
      EXPECT_THAT(outcome.text, StartsWith("expert_parallel::" + operation + ": rank "));
      const Outcome again =
          outcome_of([&] { world_.layer(rank).barrier(false, world_.place(rank).stream()); });
      expect_timeout(again, outcome.text, std::chrono::duration<double>(timeout()).count());
    }
    const auto start = std::chrono::steady_clock::now();
    for (const auto& one : world_.layers()) one->close();
    EXPECT_LT(seconds_since(start), on_gpu() ? 1 : 2);
    world_.make(small_config(4));
    expect_working(world_);
  }
  // All ranks but 2 have timed out.
  void expect_timeouts(const std::vector<Outcome>& outcomes) {
    for (const int rank : {0, 1, 3}) {
      expect_timeout(outcomes[std::size_t(rank)], "rank 2", kInTime);
    }
  }

  World world_{device(), 4};
};
INSTANTIATE_TEST_SUITE_P(Cpu, Absence, ::testing::Values(Device{}));
INSTANTIATE_TEST_SUITE_P(Gpu, Absence, ::testing::Values(kGpu));

TEST_P(Absence, AtCreation) {
  const Ranks& ranks = world_.ranks();
  const auto outcomes = without_rank_2(ranks, [&](int rank) { ranks.layer(rank, config()); });
  expect_timeouts(outcomes);
  EXPECT_EQ(outcomes[2].code, ErrorCode::timeout) << outcomes[2].text;
  EXPECT_LT(outcomes[2].seconds, kInTime);
  expect_working(World(device(), small_config(4), 4));
}

TEST_P(Absence, OfEverybodyElseAtCreation) {
  const Outcome outcome = outcome_of([&] { world_.ranks().layer(0, config()); });
  expect_timeout(outcome, "1", kInTime);
  EXPECT_THAT(outcome.text, HasSubstr("expert_parallel::AllToAll: "));
  EXPECT_THAT(outcome.text, HasSubstr("3"));
}

TEST_P(Absence, AtDispatch) {
  for (const int nodes : {1, 2, 4}) {
    SCOPED_TRACE(nodes);
    world_.make(config(nodes));
    expect_named("dispatch", nodes, [&](int rank) { dispatch(rank); });
  }
}

TEST_P(Absence, AtWorstCaseDispatch) {
  for (const int nodes : {1, 2}) {
    SCOPED_TRACE(nodes);
    world_.make(config(nodes));
    expect_named("dispatch", nodes, [&](int rank) { dispatch(rank, 30); });
  }
}

TEST_P(Absence, AtCombine) {
  for (const int nodes : {1, 2, 4}) {
    SCOPED_TRACE(nodes);
    world_.make(config(nodes));
    const auto got = world_.dispatched(
        [&](int rank, Given& given) { given = Given(world_.place(rank), 4, 0, 1); });
    expect_named("combine", nodes, [&](int rank) {
      const Descriptor& descriptor = *got[std::size_t(rank)].descriptor;
      CombineArgs args;
      args.expert_output = world_.layer(rank).combine_buffer(descriptor);
      args.stream = world_.place(rank).stream();
      world_.layer(rank).combine(args, descriptor);
    });
  }
}

TEST_P(Absence, AtBarrier) {
  for (const bool node_only : {false, true}) {
    SCOPED_TRACE(node_only);
    world_.make(config());
    expect_named("barrier", 1, [&](int rank) {
      world_.layer(rank).barrier(node_only, world_.place(rank).stream());
    });
  }
}

TEST_P(Absence, BecauseTheRankHasClosed) {
  world_.make(config());
  world_.layer(2).close();
  expect_timeouts(world_.run([&](int rank) {
    if (rank != 2) dispatch(rank);
  }));
}

TEST_P(Absence, AtClose) {
  world_.make(config());
  const auto outcomes = world_.run([&](int rank) {
    if (rank != 2) world_.layer(rank).close();
  });
  for (const Outcome& outcome : outcomes) EXPECT_LT(outcome.seconds, kInTime);
}

TEST(Lifecycle, AClosedLayerSaysSo) {
  const Ranks ranks(2);
  const Layers layers = ranks.layers(small_config(2));
  std::vector<Dispatched> got(2);
  expect_all_return(ranks.run([&](int rank) {
    const Given given(kHere);
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
  expect_closed("dispatch", [&] { layers[0]->dispatch(Given(kHere).args); });
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
      const Given given(kHere);
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

// Other threads may free outputs and descriptors during a dispatch.
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
        // The newest lies beside the free extent that the next dispatch's header offers.
        if (!kept.empty()) kept.pop_back();
      }
    });
    const Outcome outcome = outcome_of([&] {
      for (int i = 0; i < 1000; ++i) {
        const Given given(kHere, 1 + i % 4, i % 6);
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

TEST(Lifecycle, AHundredLayersLeaveNothing) {
  const auto make_and_use = [](int times) {
    for (int i = 0; i < times; ++i) {
      const Ranks ranks(3);
      EXPECT_EQ(ranks.layers(small_config(3)).size(), 3u);  // not used, on the same transports
      const Layers layers = ranks.layers(small_config(3));
      expect_all_return(ranks.run([&](int rank) {
        const Given given(kHere);
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

// Layers and notifiers leave no keys in a store that outlives them.
TEST(Lifecycle, TheStoreIsEmptyOnceTheyAreMade) {
  const TemporaryFolder folder;
  const auto store = std::make_shared<FileStore>(folder.path(), "test");
  const Ranks ranks(3);
  for (int again = 0; again < 3; ++again) {
    expect_all_return(ranks.run([&](int rank) {
      const AllToAll layer(ranks.transport(rank), store, small_config(3));
      const Notifier notifier(ranks.transport(rank), store, {.experts = 6});
    }));
    EXPECT_EQ(entries_of(folder.path() / "test"), 0);
  }
}

}  // namespace
}  // namespace winnow::expert_parallel
