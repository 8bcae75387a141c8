// expert_parallel::notify: the case table, two nodes worked by hand, a thousand calls of changing
// sizes, worst-case calls between others, what is sent.
#include "winnow/expert_parallel/notify/notify.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <tuple>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "winnow/expert_parallel/testing/forwarding_transport.h"
#include "winnow/expert_parallel/testing/notify_devices.h"
#include "winnow/expert_parallel/testing/notify_problem.h"
#include "winnow/expert_parallel/testing/ranks.h"
#include "winnow/testing/expect.h"

namespace winnow::expert_parallel {
namespace {

using ::testing::Each;
using ::testing::ElementsAreArray;
using TransportPointer = std::shared_ptr<Transport>;

WINNOW_CASE_TABLE(NotifyCases, "expert_parallel::notify");

// Two nodes of two ranks with two experts each, two channels, alignment 2.
struct ByHand {
  std::vector<std::int32_t> indices;  // [n, 2]
  std::vector<double> node_channels, rank_channels, from_nodes, from_ranks, pairs;
};
const ByHand kByHand[] = {
    // Tokens for ranks 0 and 2; 1; 3 (twice expert 7); none.
    {{0, 5, 2, 3, 7, 7, 8, -1},
     {2, 2, 1, 2},
     {1, 1, 1, 1, 1, 1, 0, 1},
     {2, 2},
     {1, 1, 1, 3},
     {4, 2}},
    // For ranks 2 and 3. The second channel is empty.
    {{4, 6}, {0, 0, 1, 1}, {0, 0, 0, 0, 1, 1, 1, 1}, {0, 2}, {1, 1, 1, 1}, {2, 2}},
    // No token.
    {{}, {0, 0, 0, 0}, {0, 0, 0, 0, 0, 0, 0, 0}, {2, 2}, {1, 2, 2, 2}, {2, 2}},
    // For rank 0; 0; 3.
    {{0, 1, 1, 0, 6, 8}, {2, 2, 0, 1}, {2, 2, 0, 0, 0, 0, 0, 1}, {1, 2}, {1, 2, 2, 3}, {2, 2}},
};

TEST(Notify, TwoNodesOfTwoRanksByHand) {
  const NotifyShape shape{.nodes = 2, .local_world_size = 2, .channels = 2, .expert_alignment = 2};
  RankTeam team(4);
  team.run([&](int rank, const TransportPointer& transport) {
    const ByHand& mine = kByHand[rank];
    Tensor indices(DType::i32, {static_cast<std::int64_t>(mine.indices.size()) / 2, 2});
    std::copy(mine.indices.begin(), mine.indices.end(), indices.values<std::int32_t>().begin());
    Notifier notifier(transport, team.world().store(), shape.config());
    EXPECT_EQ(notifier.rank(), rank);
    EXPECT_EQ(notifier.topology(), Topology(4, 2));
    const NotifyInputs inputs(shape, indices);
    const NotifyOutputs outputs(shape);
    notifier.notify(make_args(shape, inputs, outputs));
    EXPECT_EQ(testing::read(outputs.node_channel_prefix_matrix.view), mine.node_channels);
    EXPECT_EQ(testing::read(outputs.rank_channel_prefix_matrix.view), mine.rank_channels);
    EXPECT_EQ(testing::read(outputs.recv_node_prefix_sum.view), mine.from_nodes);
    EXPECT_EQ(testing::read(outputs.recv_rank_prefix_sum.view), mine.from_ranks);
    EXPECT_EQ(testing::read(outputs.recv_pairs_per_expert.view), mine.pairs);
    EXPECT_EQ(testing::read(outputs.num_forward_tokens.view)[0], mine.from_nodes.back());
    EXPECT_EQ(testing::read(outputs.num_recv_tokens.view)[0], mine.from_ranks.back());
    EXPECT_EQ(notifier.totals().forward_tokens, mine.from_nodes.back());
    EXPECT_EQ(notifier.totals().recv_tokens, mine.from_ranks.back());
    EXPECT_THAT(notifier.totals().recv_pairs_per_expert, ElementsAreArray(mine.pairs));
  });
}

// Sizes, channels and routing change from call to call, every third call is a worst-case one, and
// now and then a rank is late. Every rank makes the same random numbers.
void run_repeats(Device device, NotifyShape shape, int calls) {
  RankTeam team(shape.ranks());
  team.run([&](int rank, const TransportPointer& transport) {
    NotifyShape now = shape;
    const RankDevice place(device);
    Notifier notifier(transport, team.world().store(), on(device, now.config()));
    for (int call = 0; call < calls; ++call) {
      testing::Random random(static_cast<std::uint64_t>(call));
      now.most_tokens = random.below(60);
      now.channels = 1 + random.below(20);
      now.expert_alignment = 1 + random.below(9);
      now.choice = static_cast<ExpertChoice>(random.below(5));
      const auto late = random.below(shape.ranks() * 8);
      const std::vector<Tensor> indices = make_indices(now, random);
      NotifyInputs inputs(now, indices[static_cast<std::size_t>(rank)]);
      NotifyOutputs outputs(now);
      NotifyArgs args = make_args(now, inputs, outputs);
      args.worst_case_rows = call % 3 == 0 ? 1 : 0;
      if (late == rank) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      notify_at(place, notifier, args, inputs, outputs);
      NotifyTotals totals = notifier.totals();
      if (args.worst_case_rows > 0) {
        EXPECT_EQ(totals.recv_tokens, -1);
        EXPECT_EQ(totals.forward_tokens, -1);
        EXPECT_THAT(totals.recv_pairs_per_expert, Each(-1));
        totals = totals_of(outputs);
      }
      if (::testing::Test::HasFailure()) continue;  // one is enough, but no rank may stay away
      SCOPED_TRACE("call " + std::to_string(call) + ", rank " + std::to_string(rank));
      testing::expect_passed(compare(now, indices, rank, outputs, totals).comparisons);
    }
  });
}

class NotifyOn : public OnEachDevice {};
INSTANTIATE_TEST_SUITE_P(Cpu, NotifyOn, ::testing::Values(Device{}));
INSTANTIATE_TEST_SUITE_P(Gpu, NotifyOn, ::testing::Values(kGpu));

TEST_P(NotifyOn, AThousandCallsOfChangingSizes) {
  run_repeats(device(), {.nodes = 2, .local_world_size = 2, .topk = 3}, 1000);
}
TEST_P(NotifyOn, RepeatsOnOtherTopologies) {
  run_repeats(device(), {.nodes = 1, .local_world_size = 1, .experts_per_rank = 4}, 100);
  run_repeats(device(), {.nodes = 1, .local_world_size = 4}, 100);
  run_repeats(device(), {.nodes = 4, .local_world_size = 1}, 100);
  run_repeats(device(), {.nodes = 1, .local_world_size = 2, .experts_per_rank = 40}, 100);
}
TEST(Notify, RepeatsOnMoreRanks) {
  run_repeats({}, {.nodes = 3, .local_world_size = 2, .experts_per_rank = 1, .topk = 4}, 100);
}

// Two notifiers on one transport, of other sizes, called in turns.
TEST_P(NotifyOn, NotifiersAreIndependent) {
  const NotifyShape first{.nodes = 2, .local_world_size = 2};
  const NotifyShape second{.nodes = 4, .local_world_size = 1, .experts_per_rank = 3, .channels = 7};
  RankTeam team(4);
  team.run([&](int rank, const TransportPointer& transport) {
    const RankDevice place(device());
    Notifier one(transport, team.world().store(), on(device(), first.config())),
        two(transport, team.world().store(), on(device(), second.config()));
    for (int call = 0; call < 20; ++call) {
      for (const auto& [notifier, shape] :
           {std::tuple(&one, &first), std::tuple(&two, &second), std::tuple(&two, &second)}) {
        testing::Random random(static_cast<std::uint64_t>(call));
        const std::vector<Tensor> indices = make_indices(*shape, random);
        NotifyInputs inputs(*shape, indices[static_cast<std::size_t>(rank)]);
        NotifyOutputs outputs(*shape);
        notify_at(place, *notifier, make_args(*shape, inputs, outputs), inputs, outputs);
        testing::expect_passed(
            compare(*shape, indices, rank, outputs, notifier->totals()).comparisons);
      }
    }
  });
}

TEST_P(NotifyOn, EveryOutputMayBeAbsent) {
  const NotifyShape shape{.nodes = 2, .local_world_size = 1, .even = true};
  RankTeam team(2);
  team.run([&](int rank, const TransportPointer& transport) {
    testing::Random random(1);
    const std::vector<Tensor> indices = make_indices(shape, random);
    NotifyInputs inputs(shape, indices[static_cast<std::size_t>(rank)]);
    const RankDevice place(device());
    Notifier notifier(transport, team.world().store(), on(device(), shape.config()));
    NotifyOutputs all(shape);
    notify_at(place, notifier, make_args(shape, inputs, all), inputs, all);
    const NotifyTotals totals = notifier.totals();
    NotifyArgs args;
    args.tokens_per_rank = inputs.tokens_per_rank;
    args.tokens_per_node = inputs.tokens_per_node;
    args.tokens_per_expert = inputs.tokens_per_expert;
    args.is_token_in_rank = inputs.is_token_in_rank.view;
    args.channels = shape.channels;
    notify_at(place, notifier, args, inputs, all);
    EXPECT_EQ(notifier.totals().recv_tokens, totals.recv_tokens);
    EXPECT_EQ(notifier.totals().recv_pairs_per_expert, totals.recv_pairs_per_expert);
  });
}

// 2^31 - 32 pairs, in segments of 2^30: the second one ends at 2^31.
TEST_P(NotifyOn, RefusesMoreThan31BitsOfPairs) {
  constexpr std::int32_t kTokens = (1 << 26) - 1;
  RankTeam team(1);
  team.run([&](int, const TransportPointer& transport) {
    const RankDevice place(device());
    Notifier notifier(transport, team.world().store(), on(device(), {.experts = 1}));
    Tensor tokens(DType::i32, {1}), pairs(DType::i32, {1}), one(DType::u8, {1});
    tokens.view().at<std::int32_t>(0) = kTokens;
    pairs.view().at<std::int32_t>(0) = kTokens * 32;
    one.view().at<std::uint8_t>(0) = 1;
    const Tensor tokens_there = place.copy(tokens), pairs_there = place.copy(pairs),
                 one_there = place.copy(one);
    NotifyArgs args{.tokens_per_rank = tokens_there,
                    .tokens_per_node = tokens_there,
                    .tokens_per_expert = pairs_there,
                    .is_token_in_rank = ConstTensorView(one_there.data(), DType::u8, {kTokens, 1},
                                                        {0, 1}, device())};
    args.stream = place.stream();
    args.expert_alignment = 32;
    notifier.notify(args);
    EXPECT_EQ(notifier.totals().recv_pairs_per_expert[0], kTokens * 32);
    const std::string text =
        "expert_parallel::notify: 2147483648 pairs for this rank are more than 2^31 - 1";
    args.expert_alignment = 1 << 30;
    testing::expect_error([&] { notifier.notify(args); }, ErrorCode::invalid_argument, text);
    EXPECT_EQ(notifier.totals().recv_tokens, -1);
    // The host of a GPU learns it from the next call.
    if (device() != kGpu) return;
    args.worst_case_rows = 1;
    notifier.notify(args);
    place.wait();
    args.expert_alignment = 32;
    testing::expect_error([&] { notifier.notify(args); }, ErrorCode::invalid_argument, text);
    args.worst_case_rows = 0;
    notifier.notify(args);
    EXPECT_EQ(notifier.totals().recv_pairs_per_expert[0], kTokens * 32);
  });
}

// A transport that takes down what goes to other nodes.
class Watched : public ForwardingTransport {
 public:
  Watched(TransportPointer transport, Topology topology)
      : ForwardingTransport(std::move(transport)), topology_(topology) {}
  void put(SymmetricMemory& memory, int rank, std::size_t offset, const void* source,
           std::size_t bytes) override {
    note(rank, bytes);
    ForwardingTransport::put(memory, rank, offset, source, bytes);
  }
  void put_signal(SymmetricMemory& memory, int rank, std::size_t offset, const void* source,
                  std::size_t bytes, std::size_t signal_offset, std::uint64_t value) override {
    note(rank, bytes);
    ForwardingTransport::put_signal(memory, rank, offset, source, bytes, signal_offset, value);
  }

  // Target and bytes of each message since the last call.
  std::vector<std::pair<int, std::size_t>> take() { return std::exchange(messages_, {}); }

 private:
  void note(int to, std::size_t bytes) {
    if (!topology_.same_node(to, rank())) messages_.emplace_back(to, bytes);
  }
  Topology topology_;
  std::vector<std::pair<int, std::size_t>> messages_;
};

TEST(Notify, OneMessagePerOtherNodeWhateverTheNumberOfTokens) {
  NotifyShape shape{.nodes = 3, .local_world_size = 2, .even = true};
  RankTeam team(6);
  team.run([&](int rank, const TransportPointer& transport) {
    const auto watched = std::make_shared<Watched>(transport, Topology(6, 2));
    Notifier notifier(watched, team.world().store(), shape.config());
    std::vector<std::pair<int, std::size_t>> expected;
    for (const std::int64_t tokens : {0, 1, 1000}) {
      NotifyShape now = shape;
      now.most_tokens = tokens;
      testing::Random random(1);
      const std::vector<Tensor> indices = make_indices(now, random);
      const NotifyInputs inputs(now, indices[static_cast<std::size_t>(rank)]);
      const NotifyOutputs outputs(now);
      watched->take();  // what the constructor sent, or other threads' idle words
      notifier.notify(make_args(now, inputs, outputs));
      const auto messages = watched->take();
      ASSERT_EQ(messages.size(), 2u);
      // To the rail peers, from the next node on: no rank is everyone's first.
      EXPECT_EQ(messages[0].first, (rank + 2) % 6);
      EXPECT_EQ(messages[1].first, (rank + 4) % 6);
      if (expected.empty()) expected = messages;
      EXPECT_EQ(messages, expected);
    }
  });
}

}  // namespace
}  // namespace winnow::expert_parallel
