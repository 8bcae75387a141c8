// expert_parallel::LowLatency: the case table, calls in halves, refusals, ranks that do not come.
#include "winnow/expert_parallel/low_latency/low_latency.h"

#include <algorithm>
#include <cstring>
#include <latch>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "winnow/core/device_memory.h"
#include "winnow/expert_parallel/testing/all_to_all_ranks.h"
#include "winnow/expert_parallel/testing/low_latency_problem.h"
#include "winnow/expert_parallel/testing/on_each_device.h"
#include "winnow/testing/expect.h"
#include "winnow/testing/generate.h"

namespace winnow::expert_parallel {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;
using ::testing::StartsWith;

WINNOW_CASE_TABLE(LowLatencyCases, "expert_parallel::low_latency");

// Three ranks, each a thread with a layer and tensors of its own.
class ThreeRanks : public OnEachDevice {
 protected:
  static constexpr int kWorld = 3;
  ThreeRanks() : rounds_(make_rounds(problem_)) {}

  // Makes a layer, a place and tensors on every rank.
  void make(bool shrink, std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
    layers_.resize(kWorld);
    places_.resize(kWorld);
    tensors_.resize(kWorld);
    expect_all_return(run([&](int rank) {
      LowLatencyConfig config = problem_.config();
      config.enable_shrink = shrink;
      config.timeout = timeout;
      config.device = device();
      layers_[std::size_t(rank)] =
          std::make_unique<LowLatency>(ranks_.transport(rank), ranks_.store(), config);
      renew(rank);
    }));
  }
  void renew(int rank) {
    const auto me = std::size_t(rank);
    tensors_[me].reset();
    places_[me] = std::make_unique<RankDevice>(device());
    tensors_[me] = std::make_unique<LowLatencyTensors>(*places_[me], problem_, rounds_[0], rank);
  }
  LowLatency& layer(int rank) { return *layers_[std::size_t(rank)]; }
  LowLatencyTensors& tensors(int rank) { return *tensors_[std::size_t(rank)]; }
  const RankDevice& place(int rank) { return *places_[std::size_t(rank)]; }
  template <class Body>
  std::vector<Outcome> run(const Body& body) {
    return ranks_.run([&](int rank) {
      const DeviceGuard guard(device());
      body(rank);
    });
  }
  // Makes one more call on a GPU, since it reports errors of other ranks and of kernels only then.
  void settle(int rank) {
    if (!on_gpu()) return;
    place(rank).wait();
    layer(rank).dispatch(tensors(rank).dispatch_args(CallPart::both));
  }
  void expect_working() {
    expect_all_return(
        run([&](int rank) { expect_passed(run_rank(layer(rank), problem_, rounds_)); }));
  }

  LowLatencyProblem problem_{.name = "three", .world = kWorld, .rounds = 2};
  std::vector<LowLatencyRound> rounds_;
  Ranks ranks_{kWorld};
  std::vector<std::unique_ptr<LowLatency>> layers_;
  std::vector<std::unique_ptr<RankDevice>> places_;
  std::vector<std::unique_ptr<LowLatencyTensors>> tensors_;
};

TEST_P(ThreeRanks, RefuseWhatOneOfThemHasWrong) {
  make(false);
  const std::string text =
      "expert_parallel::low_latency_dispatch: rank 1: expert_indices: want 1 to 3 experts a "
      "token, got 4";
  const auto outcomes = run([&](int rank) {
    LowLatencyDispatchArgs args = tensors(rank).dispatch_args(CallPart::both);
    const Tensor wide = place(rank).make(DType::i32, {{args.input.size(0), 4}});
    if (rank == 1) args.expert_indices = wide;
    layer(rank).dispatch(args);
    settle(rank);
  });
  for (int rank = 0; rank < kWorld; ++rank) {
    const std::string own = "expert_parallel::low_latency_dispatch: expert_indices: ";
    EXPECT_THAT(outcomes[std::size_t(rank)].text,
                on_gpu() && rank == 1 ? StartsWith(own) : StartsWith(text));
    EXPECT_EQ(outcomes[std::size_t(rank)].code, ErrorCode::invalid_argument);
  }
  if (on_gpu())
    run([&](int rank) {
      if (rank == 1) settle(rank);
    });
  expect_working();
}

TEST_P(ThreeRanks, RefuseExpertsThatAreNoneOrComeTwice) {
  make(false);
  for (const bool twice : {false, true}) {
    const auto outcomes = run([&](int rank) {
      LowLatencyDispatchArgs args = tensors(rank).dispatch_args(CallPart::both);
      Tensor experts(DType::i32, {args.input.size(0), 2});
      for (std::int32_t& expert : experts.values<std::int32_t>()) expert = -1;
      if (rank == 1 && twice) experts.values<std::int32_t>()[0] = 4;
      if (rank == 1) experts.values<std::int32_t>()[1] = twice ? 4 : 99;
      const Tensor given = place(rank).copy(experts);
      args.expert_indices = given;
      layer(rank).dispatch(args);
      settle(rank);
    });
    for (const Outcome& outcome : outcomes) {
      EXPECT_EQ(outcome.text,
                twice ? "expert_parallel::low_latency_dispatch: rank 1: expert_indices: want each "
                        "expert at most once for a token, got 4 again for token 0"
                      : "expert_parallel::low_latency_dispatch: rank 1: expert_indices: want -1 to "
                        "9, got 99 for token 0");
    }
  }
  expect_working();
}

TEST_P(ThreeRanks, RefuseOutputsThatNobodyCouldRead) {
  make(false);
  const auto refused = [&](const char* text, const auto& change) {
    const auto outcomes = run([&](int rank) {
      LowLatencyDispatchArgs args = tensors(rank).dispatch_args(CallPart::both);
      if (rank == 1) change(args);
      layer(rank).dispatch(args);
      settle(rank);
    });
    for (int rank = 0; rank < kWorld; ++rank) {
      EXPECT_THAT(outcomes[std::size_t(rank)].text, HasSubstr(text));
      EXPECT_EQ(outcomes[std::size_t(rank)].code, ErrorCode::invalid_argument);
    }
    if (on_gpu())
      run([&](int rank) {
        if (rank == 1) settle(rank);
      });
  };
  refused("source_pairs: want memory apart from source_tokens",
          [](LowLatencyDispatchArgs& args) { args.source_pairs = args.source_tokens; });
  const TensorView output = tensors(1).dispatch_args(CallPart::both).output;
  Tensor rows = place(1).make(DType::bf16, output.shape());
  // Their sizes would say how many scales to copy, from rows that have none.
  refused("scales: want none with the format bf16", [&](LowLatencyDispatchArgs& args) {
    args.format = RowFormat::bf16;
    args.output = rows;
  });
  expect_working();
}

// A combine knows of its dispatch what pair_rows says, which is the caller's memory: a row that
// there is none of is refused, wherever among the pairs it stands.
TEST_P(ThreeRanks, RefuseRowsThatNoExpertHas) {
  problem_ = {.name = "three", .world = kWorld, .experts_per_rank = 2, .max_tokens = 40};
  rounds_ = make_rounds(problem_);
  make(false);
  const std::int64_t rows = problem_.experts_per_rank * kWorld * problem_.max_tokens;
  for (const std::int64_t pair : {std::int64_t{0}, kWorld * problem_.max_tokens * 3 - 1}) {
    for (const std::int64_t wrong : {rows, std::int64_t{-2}}) {
      const auto outcomes = run([&](int rank) {
        LowLatencyTensors& mine = tensors(rank);
        layer(rank).dispatch(mine.dispatch_args(CallPart::both));
        mine.make_expert_output();
        LowLatencyCombineArgs args = mine.combine_args(CallPart::both);
        Tensor pair_rows = place(rank).to_host(args.pair_rows);
        pair_rows.values<std::int32_t>()[std::size_t(pair)] = std::int32_t(wrong);
        const Tensor given = place(rank).copy(pair_rows);
        if (rank == 1) args.pair_rows = given;
        layer(rank).combine(args);
        settle(rank);
      });
      for (const Outcome& outcome : outcomes) {
        EXPECT_EQ(outcome.text,
                  "expert_parallel::low_latency_combine: rank 1: pair_rows: want the rows "
                  "that dispatch() gave, got " +
                      std::to_string(wrong));
      }
    }
  }
  expect_working();
}

// Handles that are alive at once, combined in another order than they were dispatched in, more of
// them than calls have places; of the dispatch itself nothing else is read.
TEST_P(ThreeRanks, CombineEarlierDispatchesInAnyOrder) {
  problem_.rounds = 5;
  rounds_ = make_rounds(problem_);
  make(false);
  expect_all_return(run([&](int rank) {
    std::vector<std::unique_ptr<LowLatencyTensors>> all;
    for (const LowLatencyRound& round : rounds_) {
      all.push_back(std::make_unique<LowLatencyTensors>(place(rank), problem_, round, rank));
      layer(rank).dispatch(all.back()->dispatch_args(CallPart::both));
    }
    for (const auto& one : all) one->make_expert_output();
    Comparisons mine;
    for (const int i : {3, 0, 4, 2, 1, 3}) {
      const LowLatencyDispatchArgs other = all[std::size_t(i)]->dispatch_args(CallPart::both);
      for (const TensorView& view : {other.source_pairs, other.ranges}) place(rank).spoil(view);
      layer(rank).combine(all[std::size_t(i)]->combine_args(CallPart::both));
      all[std::size_t(i)]->check_combined(mine);
    }
    expect_passed(mine);
  }));
}

TEST_P(ThreeRanks, RefuseAThirdCallThatIsNotReceived) {
  make(false);
  LowLatencySent sent[kWorld][2];
  expect_all_return(run([&](int rank) {
    for (LowLatencySent& one : sent[rank]) {
      one = layer(rank).dispatch(tensors(rank).dispatch_args(CallPart::send));
    }
  }));
  for (const Outcome& outcome :
       run([&](int rank) { layer(rank).dispatch(tensors(rank).dispatch_args(CallPart::send)); })) {
    EXPECT_THAT(outcome.text, HasSubstr("part: want at most two calls that were sent and not "
                                        "received, got a third"));
  }
  expect_all_return(run([&](int rank) {
    for (const LowLatencySent one : sent[rank]) {
      LowLatencyDispatchArgs args = tensors(rank).dispatch_args(CallPart::receive);
      args.sent = one;
      layer(rank).dispatch(args);
    }
    place(rank).wait();
  }));
  for (const Outcome& outcome :
       run([&](int rank) { layer(rank).combine(tensors(rank).combine_args(CallPart::receive)); })) {
    EXPECT_THAT(outcome.text, HasSubstr("part: want a call that was sent before it is received"));
  }
}

// Two calls that are sent, received in another order on each rank, with whole calls in between:
// each gets its own rows and sums.
TEST_P(ThreeRanks, ReceiveTheCallThatIsAskedFor) {
  for (const bool shrink : {false, true}) {
    make(shrink);
    expect_all_return(run([&](int rank) {
      Comparisons mine;
      std::vector<std::unique_ptr<LowLatencyTensors>> two;
      const auto anew = [&] {
        two.clear();
        for (const LowLatencyRound& round : rounds_) {
          two.push_back(std::make_unique<LowLatencyTensors>(place(rank), problem_, round, rank));
        }
      };
      const auto check = [&] {
        for (const auto& one : two) one->check_dispatched(mine);
        for (const auto& one : two) one->make_expert_output();
      };
      // On rank 1 in the order in which they were sent.
      const int first = rank == 1 ? 0 : 1;
      anew();
      for (const auto& one : two) one->dispatch(layer(rank), CallPart::send);
      for (const int i : {first, 1 - first})
        two[std::size_t(i)]->dispatch(layer(rank), CallPart::receive);
      check();
      for (const auto& one : two) one->combine(layer(rank), CallPart::send);
      for (const int i : {first, 1 - first})
        two[std::size_t(i)]->combine(layer(rank), CallPart::receive);
      for (const auto& one : two) one->check_combined(mine);
      anew();
      two[0]->dispatch(layer(rank), CallPart::send);
      two[1]->dispatch(layer(rank), CallPart::both);
      two[0]->dispatch(layer(rank), CallPart::receive);
      check();
      two[0]->combine(layer(rank), CallPart::send);
      two[1]->combine(layer(rank), CallPart::both);
      two[0]->combine(layer(rank), CallPart::receive);
      for (const auto& one : two) one->check_combined(mine);
      expect_passed(mine);
    }));
    expect_working();
  }
}

// A call is received once, by the object that has sent it, and a new one does not take the places
// of an older one that is not received. All of this concerns one rank alone.
TEST_P(ThreeRanks, RefuseToReceiveWhatIsNotInFlight) {
  make(false);
  std::vector<std::unique_ptr<LowLatency>> others(kWorld);
  expect_all_return(run([&](int rank) {
    others[std::size_t(rank)] =
        std::make_unique<LowLatency>(ranks_.transport(rank), ranks_.store(), layer(rank).config());
  }));
  run([&](int rank) {
    LowLatency &mine = layer(rank), &other = *others[std::size_t(rank)];
    const LowLatencyDispatchArgs send = tensors(rank).dispatch_args(CallPart::send);
    const auto receive = [&](LowLatency& from, LowLatencySent sent) {
      LowLatencyDispatchArgs args = tensors(rank).dispatch_args(CallPart::receive);
      args.sent = sent;
      return outcome_of([&] { from.dispatch(args); }).text;
    };
    const std::string refusal =
        "expert_parallel::low_latency_dispatch: part: want a call that was sent before it is "
        "received, got ";
    const LowLatencySent first = mine.dispatch(send), second = mine.dispatch(send),
                         others_first = other.dispatch(send);
    EXPECT_EQ(receive(mine, LowLatencySent::none), refusal + "none");
    EXPECT_EQ(receive(mine, others_first), refusal + "one that is received, or of another object");
    EXPECT_EQ(receive(other, others_first), "");
    EXPECT_EQ(receive(mine, second), "");
    EXPECT_EQ(receive(mine, second), refusal + "one that is received, or of another object");
    EXPECT_THAT(outcome_of([&] { mine.dispatch(send); }).text,
                HasSubstr("part: want the older call received first, whose places this one takes"));
    EXPECT_EQ(receive(mine, first), "");
    EXPECT_EQ(receive(mine, mine.dispatch(send)), "");
    place(rank).wait();
  });
  expect_working();
}

// What a rank combines before it has received it is refused on all ranks, and nothing is written.
// Afterwards it is a dispatch like any other.
TEST_P(ThreeRanks, RefuseToCombineWhatIsOnlySent) {
  make(false);
  LowLatencySent sent[kWorld];
  std::vector<Tensor> before(kWorld);
  const auto combine = [&](int rank, CallPart part) {
    LowLatencyCombineArgs args = tensors(rank).combine_args(part);
    args.dispatched = sent[rank];
    layer(rank).combine(args);
  };
  const auto receive = [&](int rank) {
    LowLatencyDispatchArgs args = tensors(rank).dispatch_args(CallPart::receive);
    args.sent = sent[rank];
    layer(rank).dispatch(args);
  };
  const std::string operation = "expert_parallel::low_latency_combine: ",
                    text =
                        "dispatched: want a dispatch that was received, got one that was only "
                        "sent";
  for (const CallPart part : {CallPart::both, CallPart::send}) {
    if (part == CallPart::send && on_gpu()) continue;  // it is the same check there
    const auto outcomes = run([&](int rank) {
      LowLatencyTensors& mine = tensors(rank);
      layer(rank).dispatch(mine.dispatch_args(CallPart::both));
      mine.make_expert_output();
      sent[rank] = layer(rank).dispatch(mine.dispatch_args(CallPart::send));
      if (rank != 1) receive(rank);
      before[std::size_t(rank)] = place(rank).to_host(mine.combine_args(part).out);
      combine(rank, rank == 1 ? part : CallPart::both);
      settle(rank);
    });
    for (int rank = 0; rank < kWorld; ++rank) {
      const bool own = rank == 1 && (on_gpu() || part == CallPart::send);
      EXPECT_EQ(outcomes[std::size_t(rank)].text, operation + (own ? "" : "rank 1: ") + text);
      EXPECT_EQ(outcomes[std::size_t(rank)].code, ErrorCode::invalid_argument);
      if (on_gpu() && rank != 1) continue;  // its results are unspecified
      const Tensor after = place(rank).to_host(tensors(rank).combine_args(part).out);
      const auto bytes = std::size_t(after.view().numel()) * 2;
      EXPECT_EQ(std::memcmp(after.view().data(), before[std::size_t(rank)].view().data(), bytes),
                0);
    }
    run([&](int rank) {
      if (rank == 1 && on_gpu()) settle(rank);
    });
    expect_all_return(run([&](int rank) {
      if (rank == 1) receive(rank);
      combine(rank, CallPart::both);
      Comparisons comparisons;
      tensors(rank).check_combined(comparisons);
      expect_passed(comparisons);
    }));
  }
}

// A dispatch of which rank 1 has refused its arguments has no rows on any rank.
TEST_P(ThreeRanks, RefuseToCombineADispatchThatFailed) {
  if (on_gpu()) GTEST_SKIP() << "the other ranks hear of it in a later call";
  make(false);
  expect_working();
  LowLatencySent sent[kWorld] = {};
  run([&](int rank) {
    LowLatencyTensors& mine = tensors(rank);
    layer(rank).dispatch(mine.dispatch_args(CallPart::both));
    mine.make_expert_output();
    LowLatencyDispatchArgs args = mine.dispatch_args(CallPart::send);
    if (rank == 1) args.input = {};
    sent[rank] = layer(rank).dispatch(args);
    args = mine.dispatch_args(CallPart::receive);
    args.sent = sent[rank];
    layer(rank).dispatch(args);
  });
  for (const Outcome& outcome : run([&](int rank) {
         LowLatencyCombineArgs args = tensors(rank).combine_args(CallPart::both);
         args.dispatched = rank == 0 ? sent[rank] : LowLatencySent::none;
         layer(rank).combine(args);
       })) {
    EXPECT_EQ(outcome.text,
              "expert_parallel::low_latency_combine: rank 0: dispatched: want a dispatch that was "
              "received, got one that failed");
  }
  expect_working();
}

// Rank 2 does not come to a call: an error that names it, on the others and when it comes.
TEST_P(ThreeRanks, NameARankThatDoesNotCome) {
  make(false);
  expect_working();  // loads the kernels
  for (const bool combine : {false, true}) {
    make(false, milliseconds(on_gpu() ? 300 : 1000));
    std::latch given_up(2);
    std::vector<Outcome> outcomes(kWorld);
    run([&](int rank) {
      const auto dispatch = [&] {
        layer(rank).dispatch(tensors(rank).dispatch_args(CallPart::both));
      };
      if (combine) dispatch();
      if (combine) tensors(rank).make_expert_output();
      if (rank == 2) given_up.wait();
      outcomes[std::size_t(rank)] = outcome_of([&] {
        if (combine) layer(rank).combine(tensors(rank).combine_args(CallPart::both));
        if (!combine) dispatch();
        place(rank).wait();
        dispatch();
      });
      if (rank != 2) given_up.count_down();
    });
    for (const Outcome& outcome : outcomes) expect_timeout(outcome, "for the rows of rank 2", 20);
  }
}

// Whether a rank makes its calls in halves the others need not know.
TEST_P(ThreeRanks, MakeTheirCallsInHalvesOrNot) {
  make(false);
  for (int split = 1; split < 1 << kWorld; ++split) {
    expect_all_return(run([&](int rank) {
      renew(rank);
      LowLatencyTensors& mine = tensors(rank);
      const auto each_part = [&](const auto& call) {
        if ((split >> rank & 1) == 0) return call(CallPart::both);
        call(CallPart::send);
        call(CallPart::receive);
      };
      each_part([&](CallPart part) { mine.dispatch(layer(rank), part); });
      mine.make_expert_output();
      LowLatencySent sent = LowLatencySent::none;
      each_part([&](CallPart part) {
        LowLatencyCombineArgs args = mine.combine_args(part);
        args.sent = sent;
        if (part == CallPart::send && rank == 1) args.weights = args.expert_indices = {};
        sent = layer(rank).combine(args);
      });
      Comparisons comparisons;
      mine.check_combined(comparisons);
      expect_passed(comparisons);
    }));
  }
}

// With enable_shrink it is masked, and the others go on without it.
TEST_P(ThreeRanks, GoOnWithoutARankThatDoesNotCome) {
  make(true);
  expect_working();
  make(true, milliseconds(on_gpu() ? 300 : 1000));
  expect_all_return(run([&](int rank) {
    if (rank == 2) return;
    for (int call = 0; call < 2; ++call) {
      renew(rank);
      LowLatencyTensors& mine = tensors(rank);
      layer(rank).dispatch(mine.dispatch_args(CallPart::both));
      mine.make_expert_output();
      LowLatencyCombineArgs args = mine.combine_args(CallPart::both);
      layer(rank).combine(args);
      EXPECT_EQ(layer(rank).mask(), (std::vector<std::int32_t>{0, 0, 1}));
      const Tensor out = place(rank).to_host(args.out);
      const Tensor ranges = place(rank).to_host(mine.dispatch_args(CallPart::both).ranges);
      for (int x = 0; x < problem_.experts_per_rank; ++x) {
        EXPECT_EQ(ranges.view().at<std::int64_t>(x, 2) & 0xffffffff, 0);
      }
      // Tokens whose experts all live there get zeros.
      const ConstTensorView experts = rounds_[0].indices[std::size_t(rank)];
      for (std::int64_t token = 0; token < out.size(0); ++token) {
        bool alone = true;
        for (std::int64_t k = 0; k < experts.size(1); ++k) {
          const int expert = experts.at<std::int32_t>(token, k);
          const bool kept = expert >= 0 && expert < problem_.experts();
          alone = alone && (!kept || expert / problem_.experts_per_rank == 2);
        }
        if (!alone) continue;
        EXPECT_EQ(float(out.view().at<BFloat16>(token, 0)), 0.0f);
      }
    }
  }));
  layer(0).set_mask(2, false);
  EXPECT_EQ(layer(0).mask(), (std::vector<std::int32_t>{0, 0, 0}));
}

TEST_P(ThreeRanks, CountWhatComesAndHowLongTheyWait) {
  make(false);
  expect_all_return(run([&](int rank) {
    if (rank == 1) std::this_thread::sleep_for(milliseconds(50));
    for (int i = 0; i < 2; ++i) layer(rank).dispatch(tensors(rank).dispatch_args(CallPart::both));
    if (rank == 1) return;
    const Tensor waits = place(rank).to_host(tensors(rank).waits.view());
    EXPECT_GT(waits.view().at<std::int64_t>(1), 10'000'000);
    const Tensor counts = place(rank).to_host(tensors(rank).dispatch_args(CallPart::both).counts);
    const Tensor seen = place(rank).to_host(tensors(rank).statistics.view());
    for (int x = 0; x < problem_.experts_per_rank; ++x) {
      EXPECT_EQ(seen.view().at<std::int32_t>(x), 2 * counts.view().at<std::int32_t>(x));
    }
  }));
}

// What a rank has refused itself it does not write to, and the next call is one like any other.
TEST_P(ThreeRanks, RefuseWhatIsAddedTo) {
  if (on_gpu()) GTEST_SKIP() << "the other ranks hear of it in a later call";
  make(false);
  const auto outcomes = run([&](int rank) {
    LowLatencyDispatchArgs args = tensors(rank).dispatch_args(CallPart::both);
    Tensor wrong = place(rank).make(DType::f32, {{1}});
    if (rank == 1) args.wait_statistics = wrong.view();
    layer(rank).dispatch(args);
  });
  for (const Outcome& outcome : outcomes) {
    EXPECT_THAT(outcome.text, HasSubstr("rank 1: wait_statistics: want shape"));
  }
  expect_working();
}

INSTANTIATE_TEST_SUITE_P(Cpu, ThreeRanks, ::testing::Values(Device{}));
INSTANTIATE_TEST_SUITE_P(Gpu, ThreeRanks, ::testing::Values(kGpu));

// Random sizes, routings and formats: WINNOW_SOAK_ITERATIONS calls, by default 60, on
// WINNOW_SOAK_DEVICE, cpu or cuda.
TEST(LowLatencySoak, RandomProblems) {
  constexpr int kCalls = 6;  // of a problem: dispatch and combine, three times
  const std::int64_t count = testing::environment_number("WINNOW_SOAK_ITERATIONS", 60) / kCalls;
  const Device device = soak_device();
  for (std::int64_t i = 0; i < count && !HasFailure(); ++i) {
    testing::Random random{std::uint64_t(i)};
    LowLatencyProblem problem{.name = "soak-" + std::to_string(i)};
    problem.world = int(1 + random.below(6));
    problem.experts_per_rank = int(1 + random.below(5));
    problem.topk = int(1 + random.below(std::min(problem.experts(), 9)));
    problem.given_topk = int(1 + random.below(problem.topk));
    problem.max_tokens = 1 + random.below(20);
    problem.format = static_cast<RowFormat>(random.below(4));
    problem.hidden = random.below(8) == 0 ? 4608 : 512 * (1 + random.below(2));
    if (problem.hidden > 1024) problem.max_tokens = 1 + random.below(3);
    problem.wide_indices = random.below(2) == 0;
    problem.scales_by_column = random.below(2) == 0;
    problem.halves = random.below(2) == 0;
    problem.newest_first = random.below(2) == 0;
    problem.shrink = random.below(2) == 0;
    SCOPED_TRACE(problem.name + ": " + describe(problem));
    const std::vector<LowLatencyRound> rounds = make_rounds(problem);
    const Ranks ranks(problem.world);
    expect_all_return(ranks.run([&](int rank) {
      LowLatencyConfig config = problem.config();
      config.device = device;
      LowLatency layer(ranks.transport(rank), ranks.store(), config);
      std::this_thread::sleep_for(std::chrono::microseconds(200 * rank));
      expect_passed(run_rank(layer, problem, rounds));
    }));
  }
}

TEST(LowLatencyConfigs, AreComparedAndChecked) {
  const Ranks ranks(2);
  const auto make = [&](const auto& change) {
    return ranks.run([&](int rank) {
      LowLatencyConfig config{.max_tokens = 4, .hidden = 128, .topk = 2, .experts = 4};
      change(rank, config);
      LowLatency(ranks.transport(rank), ranks.store(), config);
    });
  };
  for (const Outcome& outcome : make([](int rank, auto& config) { config.hidden += 128 * rank; })) {
    EXPECT_EQ(outcome.text,
              "expert_parallel::LowLatency: hidden: want the same on every rank, got 128 (rank 0), "
              "256 (rank 1)");
  }
  for (const Outcome& outcome : make([](int, auto& config) { config.experts = 3; })) {
    EXPECT_EQ(outcome.text,
              "expert_parallel::LowLatency: experts: want a multiple of the 2 ranks, got 3");
  }
  const auto too_many = [](int, auto& config) {
    config.experts = 1 << 12;
    config.max_tokens = 1 << 20;
  };
  for (const Outcome& outcome : make(too_many)) {
    EXPECT_EQ(outcome.text,
              "expert_parallel::LowLatency: experts: want at most 2^31 - 1 rows of a rank's "
              "experts, got 4294967296");
  }
}

TEST(LowLatencyConfigs, TheForcedBackendServesTheDeviceOrIsRefused) {
  const Ranks ranks(1);
  const auto make = [&](std::optional<Backend> forced) {
    return ranks.run([&](int rank) {
      const LowLatencyConfig config{
          .max_tokens = 4, .hidden = 128, .topk = 2, .experts = 4, .backend = forced};
      EXPECT_EQ(LowLatency(ranks.transport(rank), ranks.store(), config).backend(), Backend::cpu);
    })[0];
  };
  const std::string refusal =
      "expert_parallel::LowLatency: backend: want one that supports tensors on cpu, got cuda";
  EXPECT_EQ(make({}).text, "");
  EXPECT_EQ(make(Backend::cuda).text, refusal);
  setenv("WINNOW_BACKEND", "cuda", 1);
  EXPECT_EQ(make({}).text, refusal);
  EXPECT_EQ(make(Backend::cpu).text, "");
  unsetenv("WINNOW_BACKEND");
}

}  // namespace
}  // namespace winnow::expert_parallel
