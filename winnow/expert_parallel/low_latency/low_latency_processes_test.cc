// expert_parallel::LowLatency between processes: ranks that are killed, stopped or late, with and
// without enable_shrink.
#include <chrono>
#include <csignal>
#include <thread>
#include <tuple>

#include "winnow/expert_parallel/low_latency/low_latency.h"
#include "winnow/expert_parallel/testing/leftovers.h"
#include "winnow/expert_parallel/testing/low_latency_problem.h"
#include "winnow/expert_parallel/testing/processes.h"

namespace winnow::expert_parallel {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

constexpr int kVictim = 1, kRanks = 3;

LowLatencyProblem problem_of(int world) {
  return {.name = "processes", .world = world, .max_tokens = 8, .hidden = 128, .rounds = 2};
}

// Where the victim gets its signal: before a call or between its halves.
enum class Point { dispatch, dispatch_receive, combine, combine_receive };
constexpr const char* kPointNames[] = {"dispatch", "dispatch_receive", "combine",
                                       "combine_receive"};

using Fate = std::tuple<int, Point, bool>;  // which signal, where, and with enable_shrink or not

std::string name_of(const ::testing::TestParamInfo<Fate>& one) {
  const auto [signal, point, shrink] = one.param;
  return std::string(signal == SIGKILL ? "Killed_" : "Stopped_") + kPointNames[int(point)] +
         (shrink ? "_shrinks" : "");
}

class Fates : public ::testing::TestWithParam<Fate> {
 protected:
  static constexpr milliseconds kTimeout{500};
  static constexpr int kTurns = 6, kFateful = 3;

  // Runs all turns, or until the layer fails.
  void life(int rank, RankReport& report) const {
    const auto [signal, fateful, shrink] = GetParam();
    const auto at = [&, number = signal, fateful = fateful](int turn, Point point) {
      if (rank == kVictim && turn == kFateful && point == fateful) raise(number);
    };
    const LowLatencyProblem problem = problem_of(kRanks);
    const std::vector<LowLatencyRound> rounds = make_rounds(problem);
    const ProcessRank world(folder_.path(), rank, kRanks, "first");
    LowLatencyConfig config = problem.config();
    config.timeout = kTimeout;
    config.enable_shrink = shrink;
    LowLatency layer(world.transport, world.store, config);
    for (int turn = 0; turn < kTurns; ++turn) {
      report.stage = 1;
      const LowLatencyRound& round = rounds[std::size_t(turn) % rounds.size()];
      LowLatencyTensors tensors(kHere, problem, round, rank);
      at(turn, Point::dispatch);
      tensors.dispatch(layer, CallPart::send);
      at(turn, Point::dispatch_receive);
      tensors.dispatch(layer, CallPart::receive);
      tensors.make_expert_output();
      at(turn, Point::combine);
      tensors.combine(layer, CallPart::send);
      at(turn, Point::combine_receive);
      tensors.combine(layer, CallPart::receive);
      Comparisons comparisons;
      if (turn < kFateful) {
        tensors.check_dispatched(comparisons);
        tensors.check_combined(comparisons);
      } else if (rank != kVictim && turn > kFateful) {
        check_without_victim(layer, tensors, round, rank, report);
      }
      report.expect(comparisons);
    }
  }

  // Expects no rows of the victim, all rows of the others, and sums without the victim's experts.
  static void check_without_victim(const LowLatency& layer, const LowLatencyTensors& tensors,
                                   const LowLatencyRound& round, int rank, RankReport& report) {
    if (layer.mask() != std::vector<std::int32_t>{0, 1, 0}) report.complain("the mask");
    const LowLatencyProblem problem = problem_of(kRanks);
    const LowLatencyDispatchArgs got = tensors.dispatch_args(CallPart::both);
    for (int x = 0; x < problem.experts_per_rank; ++x) {
      for (int source = 0; source < kRanks; ++source) {
        const auto rows = got.ranges.at<std::int64_t>(x, source) & 0xffffffff;
        const std::size_t want = source == kVictim
                                     ? 0
                                     : low_latency_oracle::pairs_of(
                                           round.world, source, rank * problem.experts_per_rank + x)
                                           .size();
        if (rows != std::int64_t(want)) report.complain("rows of rank " + std::to_string(source));
      }
    }
    Comparisons comparisons;
    tensors.check_combined(comparisons, kVictim);
    report.expect(comparisons);
  }

  // The survivors become ranks 0 and 1 of a new world.
  void afterlife(int rank, RankReport& report) const {
    const LowLatencyProblem problem = problem_of(2);
    const ProcessRank world(folder_.path(), rank == 0 ? 0 : 1, 2, "second");
    LowLatency layer(world.transport, world.store, problem.config());
    report.expect(run_rank(layer, problem, make_rounds(problem)));
    report.stage = 4;
  }

  TemporaryFolder folder_;
};

TEST_P(Fates, SurvivorsAreNotifiedOrGoOn) {
  const auto [signal, point, shrink] = GetParam();
  Processes processes(kRanks, [this](int rank, RankReport& report) {
    report.take(outcome_of([&] { life(rank, report); }));
    report.stage = 3;
    if (rank != kVictim) afterlife(rank, report);
  });
  if (signal == SIGSTOP) processes.await_stopped(kVictim);
  for (const int rank : {0, 2}) {
    processes.await(rank, 4);
    SCOPED_TRACE("rank " + std::to_string(rank));
    const RankReport& report = processes.report(rank);
    if (shrink) {
      EXPECT_STREQ(report.text, "");
      EXPECT_LT(report.seconds, 20);
      continue;
    }
    EXPECT_EQ(report.code, int(ErrorCode::timeout)) << report.text;
    EXPECT_THAT(report.text, HasSubstr("rank 1"));
    EXPECT_LT(report.seconds, 20);
  }
  // The victim continues when the others already have another layer, and must not hang.
  if (signal == SIGSTOP) {
    processes.send(kVictim, SIGCONT);
    processes.expect_ended_well(kVictim);
    if (!shrink) {
      EXPECT_EQ(processes.report(kVictim).code, int(ErrorCode::timeout))
          << processes.report(kVictim).text;
    }
  } else {
    EXPECT_TRUE(WIFSIGNALED(processes.join(kVictim)));
  }
  for (const int rank : {0, 2}) processes.expect_ended_well(rank);
}

INSTANTIATE_TEST_SUITE_P(
    Everywhere, Fates,
    ::testing::Combine(::testing::Values(SIGKILL, SIGSTOP),
                       ::testing::Values(Point::dispatch, Point::dispatch_receive, Point::combine,
                                         Point::combine_receive),
                       ::testing::Bool()),
    name_of);

// A rank that is late or stopped for less than the deadline causes no error and is not masked.
TEST(LowLatencyProcesses, MayBeLate) {
  for (const bool shrink : {false, true}) {
    const TemporaryFolder folder;
    Processes processes(kRanks, [&](int rank, RankReport& report) {
      LowLatencyProblem problem = problem_of(kRanks);
      problem.shrink = shrink;
      const std::vector<LowLatencyRound> rounds = make_rounds(problem);
      const ProcessRank world(folder.path(), rank, kRanks);
      LowLatency layer(world.transport, world.store, problem.config());
      for (int turn = 1; turn <= 14; ++turn) {
        if (rank == 2 && turn % 7 == 0) std::this_thread::sleep_for(milliseconds(30));
        report.expect(run_rank(layer, problem, rounds));
        report.stage = turn;
      }
      if (layer.mask() != std::vector<std::int32_t>(kRanks)) report.complain("the mask");
    });
    for (int turn = 1; turn <= 3; ++turn) {
      processes.await(kVictim, 3 * turn);
      processes.send(kVictim, SIGSTOP);
      std::this_thread::sleep_for(milliseconds(60));
      processes.send(kVictim, SIGCONT);
    }
    for (int rank = 0; rank < kRanks; ++rank) processes.expect_ended_well(rank);
  }
}

}  // namespace
}  // namespace winnow::expert_parallel
