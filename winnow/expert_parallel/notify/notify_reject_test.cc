// What notify refuses: the same text on every rank, nothing written, and the next call works; and
// waits that end.
#include <chrono>
#include <cstdlib>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "winnow/expert_parallel/notify/notify.h"
#include "winnow/expert_parallel/queue_buffers/queue_buffers.h"
#include "winnow/expert_parallel/testing/notify_devices.h"
#include "winnow/expert_parallel/testing/notify_problem.h"
#include "winnow/expert_parallel/testing/ranks.h"
#include "winnow/expert_parallel/testing/test_ranks.h"
#include "winnow/expert_parallel/transport/shared_memory/shared_memory.h"
#include "winnow/testing/expect.h"

namespace winnow::expert_parallel {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using TransportPointer = std::shared_ptr<Transport>;

const NotifyShape kShape{.nodes = 2,
                         .local_world_size = 2,
                         .most_tokens = 9,
                         .even = true,
                         .choice = ExpertChoice::distinct};

// Changes the arguments of one rank, with its inputs to be spoiled.
using Spoil = std::function<void(NotifyArgs& args, NotifyInputs& inputs)>;

class NotifyRefusal : public OnEachDevice {
 protected:
  NotifyRefusal() : team_(4), places_(4), notifiers_(4) {}
  void SetUp() override {
    OnEachDevice::SetUp();
    if (IsSkipped()) return;
    team_.run([&](int rank, const TransportPointer& transport) {
      places_[at(rank)] = std::make_unique<RankDevice>(device());
      notifiers_[at(rank)] = std::make_unique<Notifier>(transport, team_.world().store(),
                                                        on(device(), kShape.config()));
    });
  }

  static std::size_t at(int rank) { return static_cast<std::size_t>(rank); }

  // One call with changes on some ranks, then one without.
  void expect_refusal(const std::vector<std::pair<int, Spoil>>& spoils, const std::string& text) {
    testing::Random random(1);
    const std::vector<Tensor> indices = make_indices(kShape, random);
    const auto call = [&](bool spoiled) {
      return texts(team_, [&, spoiled](int rank, const TransportPointer&) {
        NotifyInputs inputs(kShape, indices[at(rank)]);
        NotifyOutputs outputs(kShape);
        NotifyArgs args = make_args(kShape, inputs, outputs);
        for (const auto& [where, spoil] : spoils) {
          if (spoiled && where == rank) spoil(args, inputs);
        }
        Notifier& notifier = *notifiers_[at(rank)];
        try {
          notify_at(*places_[at(rank)], notifier, args, inputs, outputs);
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
          EXPECT_EQ(outputs.count_written(), 0);
          EXPECT_EQ(notifier.totals().recv_tokens, -1);
          EXPECT_EQ(notifier.totals().forward_tokens, -1);
          EXPECT_THAT(notifier.totals().recv_pairs_per_expert, Each(-1));
          throw;
        }
        testing::expect_passed(
            compare(kShape, indices, rank, outputs, notifier.totals()).comparisons);
      });
    };
    EXPECT_THAT(call(true), Each("expert_parallel::notify: " + text));
    EXPECT_THAT(call(false), Each(""));
  }
  void expect_refusal(const Spoil& spoil, const std::string& text) {
    for (const int rank : {0, 3}) {
      expect_refusal({{rank, spoil}}, "rank " + std::to_string(rank) + ": " + text);
    }
  }

  RankTeam team_;
  std::vector<std::unique_ptr<RankDevice>> places_;
  std::vector<std::unique_ptr<Notifier>> notifiers_;
};
INSTANTIATE_TEST_SUITE_P(Cpu, NotifyRefusal, ::testing::Values(Device{}));
INSTANTIATE_TEST_SUITE_P(Gpu, NotifyRefusal, ::testing::Values(kGpu));

TEST_P(NotifyRefusal, OptionsOutOfRange) {
  expect_refusal([](NotifyArgs& args, NotifyInputs&) { args.channels = 0; },
                 "channels: want at least 1, got 0");
  expect_refusal([](NotifyArgs& args, NotifyInputs&) { args.expert_alignment = 0; },
                 "expert_alignment: want at least 1, got 0");
  expect_refusal([](NotifyArgs& args, NotifyInputs&) { args.worst_case_rows = -1; },
                 "worst_case_rows: want at least 0, got -1");
}

TEST_P(NotifyRefusal, OfTheCaller) {
  const Error refusal(ErrorCode::invalid_argument, "an engine", "no counts");
  expect_refusal(
      [&](NotifyArgs& args, NotifyInputs&) { args = {.stream = args.stream, .refusal = &refusal}; },
      "no counts");
}

TEST_P(NotifyRefusal, OptionsThatDiffer) {
  const Spoil four_channels = [](NotifyArgs& args, NotifyInputs&) {
    args.channels = 4;
    args.node_channel_prefix_matrix = args.rank_channel_prefix_matrix = {};
  };
  expect_refusal({{2, four_channels}}, "channels differs: 3 on rank 0, 4 on rank 2");
  expect_refusal({{0, four_channels}}, "channels differs: 4 on rank 0, 3 on rank 1");
}

TEST_P(NotifyRefusal, TheLowestRankIsNamed) {
  const Spoil channels = [](NotifyArgs& args, NotifyInputs&) { args.channels = -7; };
  const Spoil alignment = [](NotifyArgs& args, NotifyInputs&) { args.expert_alignment = -8; };
  expect_refusal({{3, channels}, {1, alignment}},
                 "rank 1: expert_alignment: want at least 1, got -8");
  expect_refusal({{0, channels}, {1, channels}, {2, channels}, {3, channels}},
                 "rank 0: channels: want at least 1, got -7");
}

TEST_P(NotifyRefusal, CountsThatCannotBe) {
  const auto set = [](Tensor NotifyInputs::* counts, std::int64_t index, std::int32_t value) {
    return [=](NotifyArgs&, NotifyInputs& inputs) {
      (inputs.*counts).view().at<std::int32_t>(index) = value;
    };
  };
  expect_refusal(set(&NotifyInputs::tokens_per_expert, 5, -1),
                 "tokens_per_expert: want counts of at least 0, got -1 for expert 5");
  for (const std::int32_t value : {-2, 1000}) {
    const auto run = [&](int rank) {
      testing::Random random(1);
      const NotifyInputs inputs(kShape, make_indices(kShape, random)[at(rank)]);
      const auto tokens = [](const Tensor& counts, std::int64_t index) {
        return std::to_string(counts.view().at<std::int32_t>(index));
      };
      const std::string who = "rank " + std::to_string(rank) + ": ";
      const std::string got = " as in is_token_in_rank, got " + std::to_string(value);
      expect_refusal(
          {{rank, set(&NotifyInputs::tokens_per_rank, 2, value)}},
          who + "tokens_per_rank: want " + tokens(inputs.tokens_per_rank, 2) + " for rank 2" + got);
      expect_refusal(
          {{rank, set(&NotifyInputs::tokens_per_node, 1, value)}},
          who + "tokens_per_node: want " + tokens(inputs.tokens_per_node, 1) + " for node 1" + got);
    };
    run(0);
    run(3);
  }
  // Rank 0 sends tokens to rank 1, so that there is a pair for expert 2 or 3.
  testing::Random random(1);
  const NotifyInputs inputs(kShape, make_indices(kShape, random)[0]);
  const std::int32_t tokens = inputs.tokens_per_rank.view().at<std::int32_t>(1);
  ASSERT_GT(tokens, 0);
  const std::string wanted = "rank 0: tokens_per_expert: want " + std::to_string(tokens) + " to " +
                             std::to_string(32 * tokens) + " for the " + std::to_string(tokens) +
                             " tokens of rank 1, got ";
  for (const std::int32_t pairs : {tokens - 1, 32 * tokens + 1}) {
    expect_refusal({{0,
                     [&](NotifyArgs&, NotifyInputs& spoiled) {
                       spoiled.tokens_per_expert.view().at<std::int32_t>(2) = pairs;
                       spoiled.tokens_per_expert.view().at<std::int32_t>(3) = 0;
                     }}},
                   wanted + std::to_string(pairs));
  }
}

TEST_P(NotifyRefusal, TensorsOfOtherForms) {
  const auto with = [](auto NotifyArgs::* tensor, const auto& view) {
    return [=](NotifyArgs& args, NotifyInputs&) { args.*tensor = view; };
  };
  Tensor three(DType::i32, {3}), floats(DType::f32, {4}), matrix(DType::i32, {2, 4});
  expect_refusal(with(&NotifyArgs::tokens_per_rank, ConstTensorView()),
                 "tokens_per_rank: want a tensor of shape [W=4], got none");
  expect_refusal(with(&NotifyArgs::tokens_per_rank, ConstTensorView(floats)),
                 "tokens_per_rank: want dtype i32, got f32");
  expect_refusal(with(&NotifyArgs::tokens_per_node, ConstTensorView(three)),
                 "tokens_per_node: want shape [W/L=2], got [3]");
  expect_refusal(with(&NotifyArgs::tokens_per_expert, ConstTensorView(three)),
                 "tokens_per_expert: want shape [E=8], got [3]");
  expect_refusal(with(&NotifyArgs::is_token_in_rank, ConstTensorView(three)),
                 "is_token_in_rank: want 2 dimensions [n, W], got shape [3]");
  expect_refusal(with(&NotifyArgs::is_token_in_rank, ConstTensorView(matrix)),
                 "is_token_in_rank: want dtype u8, got i32");
  expect_refusal(with(&NotifyArgs::node_channel_prefix_matrix, TensorView(matrix)),
                 "node_channel_prefix_matrix: want shape [W/L=2, C=3], got [2, 4]");
  expect_refusal(with(&NotifyArgs::rank_channel_prefix_matrix, TensorView(matrix)),
                 "rank_channel_prefix_matrix: want shape [W=4, C=3], got [2, 4]");
  expect_refusal(with(&NotifyArgs::recv_node_prefix_sum, TensorView(three)),
                 "recv_node_prefix_sum: want shape [W/L=2], got [3]");
  expect_refusal(with(&NotifyArgs::recv_rank_prefix_sum, TensorView(floats)),
                 "recv_rank_prefix_sum: want dtype i32, got f32");
  expect_refusal(with(&NotifyArgs::num_recv_tokens, TensorView(three)),
                 "num_recv_tokens: want shape [1], got [3]");
  expect_refusal(with(&NotifyArgs::num_forward_tokens, TensorView(three)),
                 "num_forward_tokens: want shape [1], got [3]");
  expect_refusal(with(&NotifyArgs::recv_pairs_per_expert, TensorView(three)),
                 "recv_pairs_per_expert: want shape [E/W=2], got [3]");
  const Device other = device() == kGpu ? Device{} : kGpu;
  expect_refusal(
      with(&NotifyArgs::recv_rank_prefix_sum, TensorView(floats.data(), DType::i32, {4}, other)),
      "recv_rank_prefix_sum: want device " + to_string(device()) + ", got " + to_string(other));
}

TEST_P(NotifyRefusal, QueueBuffersThatAreTooSmall) {
  QueueShape shape{.bytes_per_token = 48,
                   .recv_tokens = 5,
                   .nodes = 2,
                   .local_world_size = 2,
                   .channels = kShape.channels};
  const std::int64_t local = local_buffer_layout(shape).bytes;
  shape.recv_tokens = 7;
  const std::int64_t node = node_buffer_layout(shape).bytes;
  const auto with = [&](std::int64_t node_bytes, std::int64_t local_bytes, std::int64_t tokens) {
    return [=](NotifyArgs& args, NotifyInputs&) {
      args.queues = {.bytes_per_token = 48,
                     .node_recv_tokens = tokens,
                     .local_recv_tokens = 5,
                     .node_buffer_bytes = node_bytes,
                     .local_buffer_bytes = local_bytes};
    };
  };
  expect_refusal(with(node, local - 1, 7), "local_buffer_bytes: want at least " +
                                               std::to_string(local) + " bytes, got " +
                                               std::to_string(local - 1));
  expect_refusal(with(node - 1, local, 7), "node_buffer_bytes: want at least " +
                                               std::to_string(node) + " bytes, got " +
                                               std::to_string(node - 1));
  expect_refusal(with(node, local, -1), "recv_tokens: want at least 0, got -1");
  // Just enough.
  testing::Random random(1);
  const std::vector<Tensor> indices = make_indices(kShape, random);
  team_.run([&](int rank, const TransportPointer&) {
    NotifyInputs inputs(kShape, indices[at(rank)]);
    NotifyOutputs outputs(kShape);
    NotifyArgs args = make_args(kShape, inputs, outputs);
    with(node, local, 7)(args, inputs);
    notify_at(*places_[at(rank)], *notifiers_[at(rank)], args, inputs, outputs);
  });
}

TEST(NotifierCreation, SizesThatDoNotDivide) {
  const auto make = [](const NotifierConfig& config) {
    RankTeam team(4);
    return texts(team, [&](int, const TransportPointer& transport) {
      Notifier(transport, team.world().store(), config);
    });
  };
  EXPECT_THAT(make({.experts = 10}),
              Each("expert_parallel::Notifier: experts: want a multiple of world_size 4, got 10"));
  EXPECT_THAT(make({.experts = 0}),
              Each("expert_parallel::Notifier: experts: want a multiple of world_size 4, got 0"));
  EXPECT_THAT(make({.experts = 8, .local_world_size = 3}),
              Each("expert_parallel::Notifier: local_world_size: want a divisor of world_size 4, "
                   "got 3"));
  EXPECT_THAT(make({.experts = 8, .local_world_size = -1}),
              Each("expert_parallel::Notifier: local_world_size: want a divisor of world_size 4, "
                   "got -1"));
}

TEST(NotifierCreation, FieldsThatDifferAreNamed) {
  RankTeam team(4);
  EXPECT_THAT(texts(team,
                    [&](int rank, const TransportPointer& transport) {
                      Notifier(transport, team.world().store(), {.experts = rank == 2 ? 12 : 8});
                    }),
              Each(AllOf(StartsWith("expert_parallel::Notifier: "), HasSubstr("experts"),
                         HasSubstr("12"), HasSubstr("8"), HasSubstr("rank 2"))));
}

TEST(NotifierCreation, ARankThatNeverComesEndsTheWait) {
  RankTeam team(3);
  const auto begin = std::chrono::steady_clock::now();
  const auto found = texts(team, [&](int rank, const TransportPointer& transport) {
    if (rank == 1) return;
    Notifier(transport, team.world().store(), {.experts = 3, .timeout = std::chrono::seconds(2)});
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
  EXPECT_EQ(found[1], "");
  EXPECT_THAT(found[0], AllOf(HasSubstr("rank 1"), HasSubstr("2.0 s")));
  EXPECT_THAT(found[2], AllOf(HasSubstr("rank 1"), HasSubstr("2.0 s")));
}

class NotifierFaultsOn : public OnEachDevice {};
INSTANTIATE_TEST_SUITE_P(Cpu, NotifierFaultsOn, ::testing::Values(Device{}));
INSTANTIATE_TEST_SUITE_P(Gpu, NotifierFaultsOn, ::testing::Values(kGpu));

TEST_P(NotifierFaultsOn, ARankThatDoesNotCallEndsTheWaitsOfAll) {
  constexpr std::chrono::seconds kTimeout(2);
  const NotifyShape shape{.nodes = 2, .local_world_size = 2, .even = true};
  RankTeam team(4);
  std::vector<std::unique_ptr<RankDevice>> places(4);
  std::vector<std::unique_ptr<Notifier>> notifiers(4);
  testing::Random random(1);
  const std::vector<Tensor> indices = make_indices(shape, random);
  const auto call = [&](int rank) {
    const auto i = static_cast<std::size_t>(rank);
    NotifyInputs inputs(shape, indices[i]);
    NotifyOutputs outputs(shape);
    notify_at(*places[i], *notifiers[i], make_args(shape, inputs, outputs), inputs, outputs);
  };
  team.run([&](int rank, const TransportPointer& transport) {
    NotifierConfig config = on(device(), shape.config());
    config.timeout = kTimeout;
    const auto i = static_cast<std::size_t>(rank);
    places[i] = std::make_unique<RankDevice>(device());
    notifiers[i] = std::make_unique<Notifier>(transport, team.world().store(), config);
    call(rank);
  });
  const auto begin = std::chrono::steady_clock::now();
  const auto found = texts(team, [&](int rank, const TransportPointer&) {
    if (rank != 2) call(rank);
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
  for (const int rank : {0, 1, 3}) {
    EXPECT_THAT(found[static_cast<std::size_t>(rank)],
                AllOf(StartsWith("expert_parallel::notify: rank "), HasSubstr("(epoch 2, seen ")));
    EXPECT_EQ(notifiers[static_cast<std::size_t>(rank)]->totals().recv_tokens, -1);
  }
  // The late one and all others get the first record at once, again and again.
  const auto late = std::chrono::steady_clock::now();
  EXPECT_THAT(texts(team, [&](int rank, const TransportPointer&) { call(rank); }),
              Each(StartsWith("expert_parallel::notify: ")));
  EXPECT_LT(std::chrono::steady_clock::now() - late, kTimeout);
}

// Ranks as processes: ten calls as the oracle says, then rank 3 leaves and the others soon know.
TEST(NotifierFaults, AProcessThatEndsEndsTheWaitsOfAll) {
  const NotifyShape shape{.nodes = 2, .local_world_size = 2};
  const TemporaryFolder folder;
  std::vector<RankProcess> processes;
  for (int rank = 0; rank < 4; ++rank) {
    processes.emplace_back([&, rank]() -> std::string {
      const auto store = std::make_shared<FileStore>(folder.path() / "store");
      Notifier notifier(create_shared_memory(*store, rank, 4, generous()), store, shape.config());
      for (std::uint64_t call = 0;; ++call) {
        if (rank == 3 && call == 10) return "left";
        testing::Random random(call);
        const std::vector<Tensor> indices = make_indices(shape, random);
        const NotifyInputs inputs(shape, indices[static_cast<std::size_t>(rank)]);
        const NotifyOutputs outputs(shape);
        notifier.notify(make_args(shape, inputs, outputs));
        if (call >= 10) return "heard from nobody in call " + std::to_string(call);
        if (!compare(shape, indices, rank, outputs, notifier.totals()).passed()) {
          return "wrong in call " + std::to_string(call);
        }
      }
    });
  }
  const auto begin = std::chrono::steady_clock::now();
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_THAT(processes[static_cast<std::size_t>(rank)].wait(),
                AllOf(StartsWith("expert_parallel::notify: "), HasSubstr("epoch 11, seen"),
                      HasSubstr("gone")));
  }
  EXPECT_EQ(processes[3].wait(), "left");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
}

TEST(NotifyBackends, TheForcedOneServesTheDeviceOrIsRefused) {
  InProcessWorld world(1);
  const TransportPointer transport = world.transport(0);
  const auto backend_of = [&](std::optional<Backend> forced) {
    Notifier notifier(transport, world.store(), {.experts = 2, .backend = forced});
    const Tensor none(DType::i32, {1}), no_experts(DType::i32, {2}), no_tokens(DType::u8, {0, 1});
    const Backend ran = notifier.notify({.tokens_per_rank = none,
                                         .tokens_per_node = none,
                                         .tokens_per_expert = no_experts,
                                         .is_token_in_rank = no_tokens});
    EXPECT_EQ(ran, notifier.backend());
    return ran;
  };
  EXPECT_EQ(backend_of({}), Backend::cpu);
  EXPECT_EQ(backend_of(Backend::cpu), Backend::cpu);
  testing::expect_error(
      [&] { backend_of(Backend::cuda); }, ErrorCode::invalid_argument,
      "expert_parallel::Notifier: backend: want one that supports tensors on cpu, got cuda");
  testing::expect_error(
      [&] { backend_of(Backend::sm90); }, ErrorCode::unsupported,
      "expert_parallel::Notifier: backend: want one that implements this operation (cuda, cpu), "
      "got sm90; did you mean cuda?");
  setenv("WINNOW_BACKEND", "cuda", 1);
  EXPECT_EQ(backend_of(Backend::cpu), Backend::cpu);
  testing::expect_error(
      [&] { backend_of({}); }, ErrorCode::invalid_argument,
      "expert_parallel::Notifier: backend: want one that supports tensors on cpu, got cuda");
  unsetenv("WINNOW_BACKEND");
}

}  // namespace
}  // namespace winnow::expert_parallel
