// GPU layers: their arenas, creation and end, and that no pointer crosses nodes. Every rank is a
// thread with a stream of its own, all on one GPU. Skipped without one.
#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "winnow/expert_parallel/testing/forwarding_transport.h"
#include "winnow/expert_parallel/testing/gpu_ranks.h"

#if WINNOW_WITH_CUDA
#include <cuda_runtime_api.h>

namespace winnow::expert_parallel {
namespace {

using ::testing::HasSubstr;

// ---- Arenas.

// Worst-case calls of 400 rows in an arena that begins with room for one and not for two.
class GpuArenas : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    Config config = small_config(2);
    config.arena_rows = kRows * 5 / 4;
    world_.make(config);
  }
  // Call number `call`, which rank `refusing` refuses. Its results stay until drop().
  std::vector<Outcome> dispatch(int call, int refusing = -1) {
    results_[call].resize(2);
    const auto outcomes = world_.dispatch(
        [&](int rank, Given& given) {
          given.args.worst_case_rows = kRows;
          if (rank == refusing) given.args.input = {};
        },
        &results_[call]);
    EXPECT_EQ(world_.layer(0).arena_bytes(), world_.layer(1).arena_bytes()) << "call " << call;
    return outcomes;
  }
  void drop(int call) { results_.erase(call); }

  static constexpr std::int64_t kRows = 400;
  World world_{kGpu, 2};
  std::map<int, std::vector<Dispatched>> results_;
};

// Rank 0 refuses a call for which rank 1 takes room that all had offered earlier, and learns of it
// only in the next one. Neither may give back a segment that the other keeps.
TEST_F(GpuArenas, AreAlikeWhereARefusalIsReceivedLater) {
  const std::int64_t begun = world_.layer(0).arena_bytes();
  for (const int call : {1, 2}) expect_all_return(dispatch(call));
  const std::int64_t grown = world_.layer(0).arena_bytes();
  EXPECT_GT(grown, 2 * begun);
  drop(1);
  expect_all_return(dispatch(3));
  drop(2);
  drop(3);
  expect_all_return(dispatch(4));  // offers all but its own room
  const auto outcomes = dispatch(5, 0);
  EXPECT_THAT(outcomes[0].text, HasSubstr("expert_parallel::dispatch: rank 0: input: want"));
  EXPECT_EQ(outcomes[1].text, "");
  EXPECT_EQ(world_.layer(0).arena_bytes(), grown);
  drop(5);
  const auto later = world_.barrier();
  EXPECT_THAT(later[1].text, HasSubstr("expert_parallel::barrier: rank 0: input: want"));
  for (const int call : {6, 7, 8, 9}) expect_all_return(dispatch(call));
  expect_working(world_);
}

// ---- Creation and end.

using GpuLayers = GpuTest;

TEST_F(GpuLayers, AHundredTimesLeaveNothing) {
  const Ranks ranks(2);
  std::size_t early = 0, late = 0, total = 0;
  for (int i = 0; i < 100; ++i) {
    const Layers layers = ranks.layers(on(kGpu, small_config(2)));
    expect_all_return(ranks.run([&](int rank) {
      const RankDevice place(kGpu);
      AllToAll& layer = *layers[std::size_t(rank)];
      const Given given(place);
      const Dispatched got = layer.dispatch(given.args);
      if (i % 2 == 0) layer.close();
      if (i % 3 == 0) place.wait();
      place.wait();
      layer.close();
    }));
    if (i == 30) check(cudaMemGetInfo(&early, &total));
  }
  check(cudaMemGetInfo(&late, &total));
  EXPECT_GE(late + (std::size_t{8} << 20), early);
}

TEST_F(GpuLayers, TwoAtOnceEvenIfOneEnds) {
  const Ranks ranks(2);
  const Problem problem{.local_world_size = 2, .choice = ExpertChoice::dropped, .weights = true};
  const std::vector<Round> rounds = make_rounds(problem);
  expect_all_return(ranks.run([&](int rank) {
    auto first = ranks.layer(rank, on(kGpu, problem.config()));
    const auto second = ranks.layer(rank, on(kGpu, problem.config()));
    expect_passed(run_rank(*first, problem, rounds));
    const RankDevice place(kGpu);
    for (int i = 0; i < 20; ++i) {
      // One closes while the other's kernels wait for the rank that is still in close().
      if (i == 10 && rank == 0) first.reset();
      second->barrier(false, place.stream());
      if (i == 10 && rank == 1) first.reset();
    }
    place.wait();
    expect_passed(run_rank(*second, problem, rounds));
  }));
}

TEST_F(GpuLayers, OutputsOutliveThem) {
  const Ranks ranks(2);
  expect_all_return(ranks.run([&](int rank) {
    const RankDevice place(kGpu);
    Dispatched got;
    {
      const auto layer = ranks.layer(rank, on(kGpu, small_config(2)));
      const Given given(place, 3, 1);
      got = layer->dispatch(given.args);
      place.wait();
    }
    const Tensor output = place.to_host(got.output.view());
    EXPECT_EQ(output.size(0), rank == 0 ? 12 : 0);
    for (const float value : output.values<float>()) EXPECT_EQ(value, 0.0f);
  }));
}

// What is allocated, by name.
class ListingTransport : public ForwardingTransport {
 public:
  ListingTransport(std::shared_ptr<Transport> transport, std::vector<std::string>& list)
      : ForwardingTransport(std::move(transport)), list_(list) {}
  std::shared_ptr<SymmetricMemory> allocate_cuda(Device device, std::size_t bytes,
                                                 const Deadline& deadline,
                                                 std::string_view what) override {
    list_.emplace_back(what);
    return ForwardingTransport::allocate_cuda(device, bytes, deadline, what);
  }

 private:
  std::vector<std::string>& list_;
};

// Without links nobody pushes rows unasked, and no memory is taken for them.
TEST_F(GpuLayers, ThatShareAGpuPushOnlyIfAsked) {
  for (const bool asked : {false, true}) {
    Config config = small_config(2);
    config.max_tokens = 3000;
    config.hidden = 8192;
    config.sm_count = 24;
    config.enable_local_combine = asked;
    const Ranks ranks(2);
    std::vector<std::vector<std::string>> lists(2);
    expect_all_return(ranks.run([&](int rank) {
      AllToAll(std::make_shared<ListingTransport>(ranks.transport(rank), lists[std::size_t(rank)]),
               ranks.store(), on(kGpu, config));
    }));
    for (const auto& list : lists) {
      EXPECT_THAT(list, ::testing::Contains("the arena"));
      EXPECT_THAT(list, ::testing::Contains("what other ranks push").Times(asked ? 1 : 0));
    }
  }
}

// ---- Between nodes.

// Counts of whose memory pointers are asked for.
class WatchedMemory : public SymmetricMemory {
 public:
  WatchedMemory(std::shared_ptr<SymmetricMemory> memory, std::vector<int>& asked)
      : SymmetricMemory(memory->local(), memory->bytes()),
        memory_(std::move(memory)),
        asked_(asked) {}
  std::byte* peer(int rank) override {
    ++asked_[std::size_t(rank)];
    return memory_->peer(rank);
  }
  std::byte* const* peers() override { return memory_->peers(); }

 private:
  std::shared_ptr<SymmetricMemory> memory_;
  std::vector<int>& asked_;
};

class WatchedTransport : public ForwardingTransport {
 public:
  WatchedTransport(std::shared_ptr<Transport> transport, std::vector<int>& asked)
      : ForwardingTransport(std::move(transport)), asked_(asked) {}
  std::shared_ptr<SymmetricMemory> allocate_cuda(Device device, std::size_t bytes,
                                                 const Deadline& deadline,
                                                 std::string_view what) override {
    return std::make_shared<WatchedMemory>(
        ForwardingTransport::allocate_cuda(device, bytes, deadline, what), asked_);
  }

 private:
  std::vector<int>& asked_;
};

TEST_F(GpuLayers, TakeNoPointerAcrossNodes) {
  for (const auto& [nodes, locals] : {std::pair{2, 2}, {4, 1}}) {
    const Problem problem{.nodes = nodes,
                          .local_world_size = locals,
                          .topk = 3,
                          .arena_rows = 4,  // grows
                          .choice = ExpertChoice::dropped,
                          .local_combine = true,
                          .weights = true,
                          .in_flight = true,
                          .rounds = 3};
    const std::vector<Round> rounds = make_rounds(problem);
    const Ranks ranks(4);
    const Topology topology(4, locals);
    std::vector<std::vector<int>> asked(4, std::vector<int>(4));
    expect_all_return(ranks.run([&](int rank) {
      AllToAll layer(
          std::make_shared<WatchedTransport>(ranks.transport(rank), asked[std::size_t(rank)]),
          ranks.store(), on(kGpu, problem.config()));
      expect_passed(run_rank(layer, problem, rounds));
    }));
    for (int rank = 0; rank < 4; ++rank) {
      for (int other = 0; other < 4; ++other) {
        const int count = asked[std::size_t(rank)][std::size_t(other)];
        if (topology.same_node(rank, other)) {
          EXPECT_GT(count, 0) << rank << " of " << other;
        } else {
          EXPECT_EQ(count, 0) << rank << " of " << other;
        }
      }
    }
  }
}

}  // namespace
}  // namespace winnow::expert_parallel

#endif
