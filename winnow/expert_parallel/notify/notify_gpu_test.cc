// What only a GPU can show of notify, beyond the tests that run on every device: graphs, refusals
// that come to light after the call, streams. Skipped without a GPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "winnow/expert_parallel/testing/notify_devices.h"
#include "winnow/expert_parallel/testing/notify_problem.h"
#include "winnow/expert_parallel/testing/ranks.h"
#include "winnow/testing/expect.h"
#include "winnow/testing/gpu_test.h"

#if WINNOW_WITH_CUDA
#include <cuda_runtime_api.h>

namespace winnow::expert_parallel {
namespace {

using ::testing::Each;
using TransportPointer = std::shared_ptr<Transport>;

const NotifyShape kShape{.nodes = 2,
                         .local_world_size = 2,
                         .most_tokens = 50,
                         .even = true,
                         .choice = ExpertChoice::distinct};

class NotifyGpu : public OnEachDevice {};
INSTANTIATE_TEST_SUITE_P(Gpu, NotifyGpu, ::testing::Values(kGpu));

// One rank's tensors on the GPU, which keep their addresses.
struct RankOnGpu {
  RankDevice place{kGpu};
  NotifyInputs inputs;
  NotifyOutputs outputs{kShape};
  NotifyCopies copies{place, inputs, outputs};
  NotifyArgs args = copies.args(make_args(kShape, inputs, outputs));

  explicit RankOnGpu(const Tensor& indices) : inputs(kShape, indices) { place.wait(); }
  void load(const Tensor& indices) {
    inputs = NotifyInputs(kShape, indices);
    copies.send_inputs();
  }
  testing::CaseOutcome compare_with_oracle(const std::vector<Tensor>& indices, int rank) {
    copies.come_back();
    return compare(kShape, indices, rank, outputs, totals_of(outputs));
  }
};

std::vector<Tensor> indices_of(std::uint64_t seed) {
  testing::Random random(seed);
  return make_indices(kShape, random);
}

TEST_P(NotifyGpu, WorstCaseCallsMayBeRecorded) {
  RankTeam team(kShape.ranks());
  team.run([&](int rank, const TransportPointer& transport) {
    const DeviceGuard guard(kGpu);
    Notifier notifier(transport, team.world().store(), on(kGpu, kShape.config()));
    RankOnGpu mine(indices_of(0)[static_cast<std::size_t>(rank)]);
    auto* const stream = static_cast<cudaStream_t>(mine.args.stream.handle);
    const auto body = [&] {
      testing::expect_error([&] { notifier.notify(mine.args); }, ErrorCode::invalid_argument,
                            "expert_parallel::notify: worst_case_rows: want above 0 while a graph "
                            "is recorded, since the host cannot wait, got 0");
      mine.args.worst_case_rows = 1;
      notifier.notify(mine.args);
    };
    const testing::Graph graph(stream, body, cudaStreamCaptureModeThreadLocal);
    EXPECT_EQ(notifier.totals().recv_tokens, -1);
    for (std::uint64_t round = 0; round < 20; ++round) {
      const std::vector<Tensor> indices = indices_of(round);
      mine.load(indices[static_cast<std::size_t>(rank)]);
      graph.launch(stream);
      testing::expect_passed(mine.compare_with_oracle(indices, rank).comparisons);
      if (round % 5 != 0) continue;  // between them, calls for which the host waits
      mine.args.worst_case_rows = 0;
      notifier.notify(mine.args);
      testing::expect_passed(mine.compare_with_oracle(indices, rank).comparisons);
      EXPECT_GE(notifier.totals().recv_tokens, 0);
    }
  });
}

// Counts that contradict the tokens, on one rank, in a call that nobody waits for.
TEST_P(NotifyGpu, TheNextCallThrowsWhatAWorstCaseCallRefused) {
  RankTeam team(kShape.ranks());
  std::vector<std::unique_ptr<RankOnGpu>> ranks(4);
  std::vector<std::unique_ptr<Notifier>> notifiers(4);
  const std::vector<Tensor> indices = indices_of(1);
  team.run([&](int rank, const TransportPointer& transport) {
    const auto i = static_cast<std::size_t>(rank);
    ranks[i] = std::make_unique<RankOnGpu>(indices[i]);
    notifiers[i] =
        std::make_unique<Notifier>(transport, team.world().store(), on(kGpu, kShape.config()));
  });
  const auto call = [&](std::int64_t worst_case_rows) {
    return texts(team, [&](int rank, const TransportPointer&) {
      const auto i = static_cast<std::size_t>(rank);
      ranks[i]->args.worst_case_rows = worst_case_rows;
      notifiers[i]->notify(ranks[i]->args);
      ranks[i]->place.wait();
    });
  };
  for (RankOnGpu* rank : {ranks[1].get(), ranks[2].get()}) {
    rank->inputs.tokens_per_expert.view().at<std::int32_t>(0) = -5;
    rank->copies.send_inputs();
  }
  EXPECT_THAT(call(1), Each(""));
  for (const auto& rank : ranks) {
    rank->copies.come_back();
    EXPECT_EQ(rank->outputs.count_written(), 0);
  }
  for (const std::size_t i : {1, 2}) ranks[i]->load(indices[i]);
  EXPECT_THAT(call(1), Each("expert_parallel::notify: rank 1: tokens_per_expert: want counts of at "
                            "least 0, got -5 for expert 0"));
  // It has run itself.
  for (int rank = 0; rank < kShape.ranks(); ++rank) {
    RankOnGpu& one = *ranks[static_cast<std::size_t>(rank)];
    testing::expect_passed(one.compare_with_oracle(indices, rank).comparisons);
  }
  EXPECT_THAT(call(0), Each(""));
  EXPECT_GE(notifiers[0]->totals().recv_tokens, 0);
}

TEST_P(NotifyGpu, WantsAStreamOfItsOwnAndTheSameKindOfDevice) {
  RankTeam team(2);
  EXPECT_THAT(texts(team,
                    [&](int, const TransportPointer& transport) {
                      Notifier notifier(transport, team.world().store(), on(kGpu, {.experts = 2}));
                      notifier.notify({});
                    }),
              Each("expert_parallel::notify: stream: want one of this rank's own, since other "
                   "ranks share cuda:0, got the default stream"));
  RankTeam other(2);
  EXPECT_THAT(texts(other,
                    [&](int rank, const TransportPointer& transport) {
                      Notifier(transport, other.world().store(),
                               on(rank == 0 ? kGpu : Device{}, {.experts = 2}));
                    }),
              Each("expert_parallel::Notifier: device: want the same on every rank, got cuda (rank "
                   "0), cpu (rank 1)"));
}

// Nothing waits at the end of a notifier, and its memory comes back.
TEST_P(NotifyGpu, ManyNotifiers) {
  RankTeam team(4);
  team.run([&](int rank, const TransportPointer& transport) {
    const std::vector<Tensor> indices = indices_of(3);
    RankOnGpu mine(indices[static_cast<std::size_t>(rank)]);
    for (int i = 0; i < 50; ++i) {
      Notifier notifier(transport, team.world().store(), on(kGpu, kShape.config()));
      mine.args.worst_case_rows = i % 2;
      notifier.notify(mine.args);
    }
    testing::expect_passed(mine.compare_with_oracle(indices, rank).comparisons);
  });
}

}  // namespace
}  // namespace winnow::expert_parallel

#endif
