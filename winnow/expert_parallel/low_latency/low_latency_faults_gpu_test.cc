// Ranks of the low-latency calls that are killed, stopped or late, as processes with a GPU each.
// Skipped where there are fewer than two GPUs, or no NVSHMEM.
#if WINNOW_WITH_CUDA
#include <memory>
#include <string>
#include <vector>

#include "winnow/expert_parallel/low_latency/low_latency.h"
#include "winnow/expert_parallel/testing/gpu_processes.h"
#include "winnow/expert_parallel/testing/late_rank.h"
#include "winnow/expert_parallel/testing/low_latency_problem.h"

namespace winnow::expert_parallel {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr milliseconds kTimeout{500};

// One rank's layer, and calls of it whose results are compared.
struct Player {
  const Rank& me;
  LowLatencyProblem problem{.name = "faults", .world = kRanks, .rounds = 2};
  std::vector<LowLatencyRound> rounds = make_rounds(problem);
  std::shared_ptr<Transport> transport;
  RankDevice place{me.gpu};

  explicit Player(const Rank& rank) : me(rank), transport(rank.join()) {}

  std::unique_ptr<LowLatency> make_layer(bool shrink, milliseconds timeout = kTimeout) const {
    LowLatencyConfig config = problem.config();
    config.device = me.gpu;
    config.enable_shrink = shrink;
    config.timeout = timeout;
    return std::make_unique<LowLatency>(transport, me.store, config);
  }
  void play(LowLatency& layer) const { want_passed(run_rank(layer, problem, rounds).list()); }
  // A dispatch, and the next call that learns of what its kernels met.
  std::string error_of_next(LowLatency& layer) const {
    const LowLatencyTensors tensors(place, problem, rounds[0], me.rank);
    return error_of([&] {
      for (int call = 0; call < 2; ++call) {
        layer.dispatch(tensors.dispatch_args(CallPart::both));
        place.wait();
      }
    });
  }
  // Calls that go on without the victim.
  void play_alone(LowLatency& layer) const {
    for (int call = 0; call < 3; ++call) {
      LowLatencyTensors tensors(place, problem, rounds[0], me.rank);
      layer.dispatch(tensors.dispatch_args(CallPart::both));
      tensors.make_expert_output();
      layer.combine(tensors.combine_args(CallPart::both));
      want(layer.mask() == std::vector<std::int32_t>{0, 1}, "the mask");
      Comparisons comparisons;
      tensors.check_combined(comparisons, kVictim);
      want_passed(comparisons.list());
    }
  }
};

std::string killed(const Rank& me) {
  check(cudaSetDevice(me.gpu.index));
  const Player player(me);
  // One waits a long time, and learns of the end at once.
  const auto layer = player.make_layer(false, std::chrono::seconds(20));
  const auto shrinking = player.make_layer(true, std::chrono::seconds(20));
  player.play(*layer);
  player.play(*shrinking);
  if (me.rank == kVictim) raise(SIGKILL);
  while (!player.transport->peer_gone(kVictim)) sleep_ms(1);
  const auto begin = Deadline::Clock::now();
  player.play_alone(*shrinking);
  const std::string text = player.error_of_next(*layer);
  const double seconds = seconds_since(begin);
  return text + (seconds < 2 ? "" : " after " + std::to_string(seconds) + " s");
}

// The victim goes on when the other has given up.
std::string stopped(const Rank& me) {
  check(cudaSetDevice(me.gpu.index));
  const Player player(me);
  const auto layer = player.make_layer(false), shrinking = player.make_layer(true);
  player.play(*layer);
  player.play(*shrinking);
  me.store->set("test/process" + std::to_string(me.rank), std::to_string(getpid()));
  const pid_t victim = std::stoi(me.store->get("test/process1", generous()).value());
  if (me.rank == kVictim) raise(SIGSTOP);
  std::string text;
  if (me.rank != kVictim) {
    sleep_ms(100);
    player.play_alone(*shrinking);
    text = player.error_of_next(*layer);
    kill(victim, SIGCONT);
  } else {
    text = player.error_of_next(*layer);
    want(error_of([&] { player.error_of_next(*shrinking); }).empty(), "it did not go on");
  }
  player.play(*player.make_layer(false, std::chrono::seconds(10)));
  return text;
}

// Kernels that come late, but in time.
std::string late(const Rank& me) {
  check(cudaSetDevice(me.gpu.index));
  const Player player(me);
  for (const bool shrink : {false, true}) {
    const auto layer = player.make_layer(shrink, std::chrono::seconds(5));
    player.play(*layer);
    const LowLatencyTensors tensors(player.place, player.problem, player.rounds[0], me.rank);
    if (me.rank == kVictim) hold_up(player.place, milliseconds(300));
    layer->dispatch(tensors.dispatch_args(CallPart::both));
    Comparisons comparisons;
    tensors.check_dispatched(comparisons);
    want_passed(comparisons.list());
    want(layer->mask() == std::vector<std::int32_t>(kRanks), "the mask");
    player.play(*layer);
  }
  return "good";
}

using LowLatencyFaults = GpuProcesses;

TEST_F(LowLatencyFaults, ARankThatIsKilled) {
  const auto answers = run("killed");
  EXPECT_EQ(answers[kVictim], "killed by signal 9");
  EXPECT_THAT(answers[0], AllOf(StartsWith("expert_parallel::low_latency_dispatch: rank 0 waited "),
                                HasSubstr(" of rank 1 ("), HasSubstr(", gone")));
}

TEST_F(LowLatencyFaults, ARankThatIsStoppedAndGoesOn) {
  for (const std::string& answer : run("stopped")) {
    EXPECT_THAT(answer, AllOf(StartsWith("expert_parallel::low_latency_dispatch: rank 0 waited 0."),
                              HasSubstr(" of rank 1 (")));
  }
}

TEST_F(LowLatencyFaults, ARankWhoseKernelsAreLate) {
  for (const std::string& answer : run("late")) EXPECT_EQ(answer, "good");
}

}  // namespace
}  // namespace winnow::expert_parallel

int main(int argc, char** argv) {
  using namespace winnow::expert_parallel;  // NOLINT
  return run_tests(argc, argv, {{"killed", killed}, {"stopped", stopped}, {"late", late}});
}

#endif
