// expert_parallel::AllToAll between processes: ranks that are killed or stopped at every point of a
// layer's life.
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <thread>
#include <tuple>

#include "winnow/expert_parallel/testing/leftovers.h"
#include "winnow/expert_parallel/testing/processes.h"
#include "winnow/testing/generate.h"

namespace winnow::expert_parallel {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

constexpr int kVictim = 1;

// `rounds` rounds of a problem of this world, checked.
void play(AllToAll& layer, const Problem& problem, RankReport& report) {
  report.expect(run_rank(layer, problem, make_rounds(problem)));
}

Problem problem_of(int world_size) {
  return {.name = "processes",
          .local_world_size = world_size,
          .max_tokens = 40,
          .hidden = 64,
          .choice = ExpertChoice::dropped,
          .weights = true};
}

enum class Point { transport, creation, dispatch, combine, close, middle };
constexpr const char* kPointNames[] = {"transport", "creation", "dispatch",
                                       "combine",   "close",    "middle"};

using Fate = std::tuple<int, Point>;  // which signal, and where

std::string name_of(const ::testing::TestParamInfo<Fate>& one) {
  const auto [signal, point] = one.param;
  return std::string(signal == SIGKILL ? "Killed_" : "Stopped_") + kPointNames[int(point)];
}

class Fates : public ::testing::TestWithParam<Fate> {
 protected:
  static constexpr milliseconds kTimeout{2000};
  static constexpr int kRanks = 3;

  // Until the layer fails, or for ever.
  void life(int rank, RankReport& report) const {
    const auto [signal, fateful] = GetParam();
    const auto at = [&, number = signal, fateful = fateful](Point point) {
      if (rank == kVictim && point == fateful) raise(number);
    };
    Problem problem = problem_of(kRanks);
    const std::vector<Round> rounds = make_rounds(problem);
    at(Point::transport);
    // A stopped rank holds up the others' creation, a short time only.
    const bool early = fateful <= Point::creation;
    const ProcessRank world(folder_.path(), rank, kRanks, "first",
                            early ? kTimeout : milliseconds(60000));
    report.stage = 1;
    at(Point::creation);
    Config config = problem.config();
    config.timeout = kTimeout;
    AllToAll layer(world.transport, world.store, config);
    for (int turn = 0;; ++turn) {
      Comparisons comparisons;
      const Round& round = rounds[std::size_t(turn) % rounds.size()];
      if (turn == 3) at(Point::dispatch);
      const Dispatched got =
          dispatch_and_check(layer, kHere, problem, round, rank, nullptr, comparisons);
      if (turn == 3) at(Point::combine);
      combine_and_check(layer, kHere, problem, round, rank, got, comparisons);
      report.expect(comparisons);
      if (turn == 3) report.stage = 2;
      if (turn == 3 && fateful == Point::close) {
        at(Point::close);
        layer.close();
        return;
      }
    }
  }

  // The survivors as ranks 0 and 1 of a new world, until the parent has seen the victim's end.
  void afterlife(int rank, RankReport& report) const {
    const Problem problem = problem_of(2);
    const ProcessRank world(folder_.path(), rank == 0 ? 0 : 1, 2, "second");
    AllToAll layer(world.transport, world.store, problem.config());
    for (int turn = 0; turn < 20; ++turn) {
      play(layer, problem, report);
      report.stage = 4 + turn;
    }
  }

  TemporaryFolder folder_;
};

TEST_P(Fates, SurvivorsAreNotifiedAndGoOn) {
  const auto [signal, point] = GetParam();
  Processes processes(kRanks, [this](int rank, RankReport& report) {
    report.take(outcome_of([&] { life(rank, report); }));
    report.stage = 3;
    if (rank != kVictim) afterlife(rank, report);
  });
  if (point == Point::middle) {
    for (int rank = 0; rank < kRanks; ++rank) processes.await(rank, 2);
    processes.send(kVictim, signal);
  }
  if (signal == SIGSTOP) processes.await_stopped(kVictim);
  const auto start = std::chrono::steady_clock::now();
  for (const int rank : {0, 2}) processes.await(rank, 3);
  EXPECT_LT(seconds_since(start), 20);
  for (const int rank : {0, 2}) {
    SCOPED_TRACE("rank " + std::to_string(rank));
    const RankReport& report = processes.report(rank);
    if (point == Point::close) {
      EXPECT_STREQ(report.text, "");
      continue;
    }
    EXPECT_EQ(report.code, int(ErrorCode::timeout)) << report.text;
    EXPECT_THAT(report.text, HasSubstr("rank 1"));
    EXPECT_LT(report.seconds, 30);
  }
  // The victim wakes up while the others already use a new layer.
  for (const int rank : {0, 2}) processes.await(rank, 5);
  if (signal == SIGSTOP) {
    processes.send(kVictim, SIGCONT);
    processes.expect_ended_well(kVictim);
    if (point != Point::close) {
      EXPECT_EQ(processes.report(kVictim).code, int(ErrorCode::timeout))
          << processes.report(kVictim).text;
    }
  } else {
    const int status = processes.join(kVictim);
    EXPECT_TRUE(WIFSIGNALED(status)) << status;
  }
  for (const int rank : {0, 2}) processes.expect_ended_well(rank);
}

INSTANTIATE_TEST_SUITE_P(Everywhere, Fates,
                         ::testing::Combine(::testing::Values(SIGKILL, SIGSTOP),
                                            ::testing::Values(Point::transport, Point::creation,
                                                              Point::dispatch, Point::combine,
                                                              Point::close, Point::middle)),
                         name_of);

// A kill at any instant of a busy layer of two nodes.
TEST(Processes, MayBeKilledAtAnyTime) {
  testing::Random random(7);
  for (int again = 0; again < 8; ++again) {
    SCOPED_TRACE(again);
    const TemporaryFolder folder;
    Processes processes(4, [&](int rank, RankReport& report) {
      Problem problem = problem_of(2);
      problem.nodes = 2;
      Config config = problem.config();
      config.timeout = std::chrono::seconds(30);
      const std::vector<Round> rounds = make_rounds(problem);
      const ProcessRank world(folder.path(), rank, 4);
      AllToAll layer(world.transport, world.store, config);
      report.take(outcome_of([&] {
        for (;;) {
          report.stage = 1;
          report.expect(run_rank(layer, problem, rounds));
        }
      }));
    });
    for (int rank = 0; rank < 4; ++rank) processes.await(rank, 1);
    std::this_thread::sleep_for(std::chrono::microseconds(random.below(40000)));
    processes.send(kVictim, SIGKILL);
    const auto start = std::chrono::steady_clock::now();
    for (const int rank : {0, 2, 3}) {
      processes.expect_ended_well(rank);
      EXPECT_EQ(processes.report(rank).code, int(ErrorCode::timeout));
      EXPECT_THAT(processes.report(rank).text, HasSubstr("rank 1"));
      EXPECT_THAT(processes.report(rank).text, HasSubstr("gone"));
    }
    EXPECT_LT(seconds_since(start), 20);  // nobody sits the deadline out: death is certain
  }
}

// Stopped for less than the deadline, nobody notices.
TEST(Processes, MayPause) {
  const TemporaryFolder folder;
  Processes processes(3, [&](int rank, RankReport& report) {
    const Problem problem = problem_of(3);
    const ProcessRank world(folder.path(), rank, 3);
    AllToAll layer(world.transport, world.store, problem.config());
    for (int turn = 1; turn <= 60; ++turn) {
      play(layer, problem, report);
      report.stage = turn;
    }
  });
  for (int turn = 1; turn <= 3; ++turn) {
    processes.await(kVictim, 10 * turn);
    processes.send(kVictim, SIGSTOP);
    std::this_thread::sleep_for(milliseconds(100));
    processes.send(kVictim, SIGCONT);
  }
  for (int rank = 0; rank < 3; ++rank) processes.expect_ended_well(rank);
}

TEST(Processes, MayEndWithoutClosing) {
  const TemporaryFolder folder;
  Processes processes(2, [&](int rank, RankReport& report) {
    const Problem problem = problem_of(2);
    const ProcessRank world(folder.path(), rank, 2);
    auto* layer = new AllToAll(world.transport, world.store, problem.config());
    play(*layer, problem, report);
    if (rank == kVictim) std::exit(0);
    // The other has gone for good, which its peer learns long before the minute is over.
    report.take(outcome_of([&] { play(*layer, problem, report); }));
    std::exit(0);
  });
  for (int rank = 0; rank < 2; ++rank) processes.expect_ended_well(rank);
  EXPECT_THAT(processes.report(0).text, HasSubstr("rank 1"));
  EXPECT_EQ(processes.report(0).code, int(ErrorCode::timeout));
}

TEST(Processes, AHundredLayersLeaveNothing) {
  const TemporaryFolder folder;
  const int shared_before = entries_of("/dev/shm");
  Processes processes(2, [&](int rank, RankReport& report) {
    const Problem problem = problem_of(2);
    const std::vector<Round> rounds = make_rounds(problem);
    const auto make_and_use = [&](int first, int last) {
      for (int i = first; i < last; ++i) {
        const ProcessRank world(folder.path(), rank, 2, "world" + std::to_string(i));
        AllToAll layer(world.transport, world.store, problem.config());
        report.expect(run_rank(layer, problem, rounds));
      }
    };
    make_and_use(0, 10);
    const int files = open_files(), maps = mappings("/memfd:");
    const std::int64_t shared = memory_of_kind("RssShmem"), all = memory_of_kind("VmRSS");
    make_and_use(10, 110);
    if (open_files() != files) report.complain("open files");
    if (mappings("/memfd:") != maps) report.complain("mappings");
    if (memory_of_kind("RssShmem") > shared + 64) report.complain("shared memory");
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    (void)all;  // freed memory stays in the sanitizer's quarantine
#else
    if (memory_of_kind("VmRSS") > all + 2048) report.complain("memory");
#endif
    report.stage = 1;
  });
  for (int rank = 0; rank < 2; ++rank) {
    processes.await(rank, 1, 120);
    processes.expect_ended_well(rank);
  }
  EXPECT_EQ(entries_of("/dev/shm"), shared_before);
}

}  // namespace
}  // namespace winnow::expert_parallel
