// Ranks that are killed, stopped or late on the transport nvshmem, on two GPUs: inside a node,
// where ranks write by pointer, and between two nodes of one rank, where they put. Skipped where
// there are fewer GPUs or no NVSHMEM.
#if WINNOW_WITH_CUDA
#include <optional>
#include <sstream>
#include <thread>

#include "winnow/expert_parallel/rendezvous/agreement.h"
#include "winnow/expert_parallel/testing/gpu_processes.h"
#include "winnow/expert_parallel/testing/late_rank.h"
#include "winnow/testing/generate.h"

namespace winnow::expert_parallel {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr milliseconds kTimeout{500}, kPatience{10000};
constexpr double kInTime = 0.5 + 1;

// One rank's layers in turn, and calls of them whose results are compared.
struct Player {
  const Rank& me;
  Problem problem;
  std::vector<Round> rounds = make_rounds(problem);
  std::shared_ptr<Transport> transport;
  RankDevice place{me.gpu};

  // With `pushes` on one node combine pushes rows, otherwise it reads them.
  Player(const Rank& rank, std::shared_ptr<Transport> its_transport, int nodes, bool pushes = false)
      : me(rank),
        problem{.name = "faults",
                .nodes = nodes,
                .local_world_size = kRanks / nodes,
                .experts_per_rank = 4,
                .topk = 4,
                .max_tokens = 300,  // several chunks of the rail
                .hidden = 64,
                .arena_rows = 20000,  // no call waits for room
                .tokens = Tokens::full,
                .token_major = pushes,
                .local_combine = pushes,
                .weights = true,
                .sm_count = 24},
        transport(std::move(its_transport)) {}

  std::unique_ptr<AllToAll> make_layer(milliseconds timeout) const {
    Config config = problem.config();
    config.device = me.gpu;
    config.timeout = timeout;
    return std::make_unique<AllToAll>(transport, me.store, config);
  }

  // A dispatch and its combines. Throws what broke the layer, if only in a kernel; without such an
  // Error, what is not as the oracle says.
  template <class BeforeCombine>
  Dispatched play(AllToAll& layer, const Round& round, const BeforeCombine& before_combine) const {
    Comparisons comparisons;
    Dispatched got =
        dispatch_and_check(layer, place, problem, round, me.rank, nullptr, comparisons);
    before_combine();
    combine_and_check(layer, place, problem, round, me.rank, got, comparisons);
    layer.barrier(false, place.stream());
    place.wait();
    layer.barrier(false, place.stream());  // the host call that learns of what the kernels met
    want_passed(comparisons.list());
    return got;
  }
  Dispatched play(AllToAll& layer, const Round& round) const {
    return play(layer, round, [] {});
  }

  // A layer made anew on the same transport is exact, and leaves alone what a rank still holds of
  // the one before: a dispatch of rounds[0].
  void play_anew(const Dispatched& held) const {
    const auto layer = make_layer(kPatience);
    for (const Round& round : rounds) play(*layer, round);
    if (held.descriptor == nullptr) return;
    Comparisons comparisons;
    check_dispatched(place, problem, rounds[0], me.rank, held, comparisons);
    want_passed(comparisons.list());
  }
};

void expect_text(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    want(text.find(part) != std::string::npos, "no \"" + part + "\" in: " + text);
  }
}

// ---- A rank that is killed: the other finds out at its next wait, letting go is quick, and
// nothing new begins.

std::string killed(const Rank& me) {
  check(cudaSetDevice(me.gpu.index));
  const auto transport = me.join();
  const Player node(me, transport, 1), nodes(me, transport, 2);
  node.play_anew({});  // so that NVSHMEM's heap need not grow within kTimeout
  auto on_node = node.make_layer(kTimeout), on_nodes = nodes.make_layer(kTimeout);
  node.play(*on_node, node.rounds[0]);
  nodes.play(*on_nodes, nodes.rounds[0]);
  if (me.rank == kVictim) raise(SIGKILL);
  while (!transport->peer_gone(kVictim)) sleep_ms(1);
  std::ostringstream message;
  on_node->barrier(false, node.place.stream());  // only enqueues
  node.place.wait();
  message << error_of([&] { on_node->barrier(false, node.place.stream()); }) << "\n";
  message << error_of([&] { nodes.play(*on_nodes, nodes.rounds[1]); }) << "\n";
  const auto begin = Deadline::Clock::now();
  on_node.reset();
  on_nodes.reset();
  if (seconds_since(begin) > 0.5) message << "close took " << seconds_since(begin) << " s\n";
  message << error_of([&] { node.make_layer(kTimeout); }) << "\n";
  message << error_of([&] { me.join("anew"); }) << "\n";
  return message.str();
}

// The same while no thread of the survivor is in the library: a graph is replayed whose kernels
// wait. They end within a second of the death, ten times earlier than their deadline.
std::string killed_in_a_graph(const Rank& me) {
  check(cudaSetDevice(me.gpu.index));
  const auto transport = me.join();
  std::ostringstream message;
  std::vector<std::unique_ptr<AllToAll>> layers;
  for (const int nodes : {1, 2}) {
    const Player player(me, transport, nodes);
    layers.push_back(player.make_layer(kPatience));
    player.play(*layers.back(), player.rounds[0]);
  }
  me.store->set("test/process" + std::to_string(me.rank), std::to_string(getpid()));
  const pid_t victim = std::stoi(me.store->get("test/process1", generous()).value());
  const Player player(me, transport, 1);
  const UnwaitedDispatch given(player.place, player.rounds[1], me.rank);
  const auto stream = static_cast<cudaStream_t>(player.place.stream().handle);
  std::vector<cudaGraphExec_t> graphs;
  std::vector<Dispatched> results;
  for (auto& layer : layers) {
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    results.push_back(layer->dispatch(given.args));
    cudaGraph_t graph = nullptr;
    check(cudaStreamEndCapture(stream, &graph));
    check(cudaGraphInstantiate(&graphs.emplace_back(), graph, 0));
    check(cudaGraphLaunch(graphs.back(), stream));
    check(cudaStreamSynchronize(stream));
  }
  if (me.rank == kVictim) {
    me.store->set("test/ready", "");
    for (;;) sleep_ms(1000);
  }
  want(me.store->get("test/ready", generous()).has_value(), "the victim is not ready");
  for (const cudaGraphExec_t graph : graphs) {
    check(cudaGraphLaunch(graph, stream));
    if (graph == graphs[0]) {
      sleep_ms(300);
      want(cudaStreamQuery(stream) == cudaErrorNotReady, "the graph has not waited");
      kill(victim, SIGKILL);
    }
    const auto begin = Deadline::Clock::now();
    check(cudaStreamSynchronize(stream));
    const double seconds = seconds_since(begin);
    if (seconds > 1) message << "the kernels ended after " << seconds << " s\n";
  }
  for (auto& layer : layers) {
    message << error_of([&] { layer->barrier(false, player.place.stream()); }) << "\n";
  }
  return message.str();
}

// A stopped process is no dead one: the wait has its deadline, and goes on when it goes on.
std::string stopped_for_a_while(const Rank& me) {
  check(cudaSetDevice(me.gpu.index));
  const auto transport = me.join();
  const Player player(me, transport, 1);
  const auto layer = player.make_layer(kPatience);
  player.play(*layer, player.rounds[0]);
  me.store->set("test/process" + std::to_string(me.rank), std::to_string(getpid()));
  const pid_t victim = std::stoi(me.store->get("test/process1", generous()).value());
  if (me.rank == kVictim) {
    raise(SIGSTOP);
  } else {
    std::thread([victim] { sleep_ms(2500), kill(victim, SIGCONT); }).detach();
  }
  player.play(*layer, player.rounds[1]);
  return "good";
}

// A process that has done its part and ends does not end what the other can still complete.
std::string ended_well(const Rank& me) {
  check(cudaSetDevice(me.gpu.index));
  const auto transport = me.join();
  const Player player(me, transport, 1);
  auto layer = player.make_layer(kPatience);
  player.play(*layer, player.rounds[0]);
  layer->barrier(false, player.place.stream());
  if (me.rank == kVictim) {
    player.place.wait();
    return "good";
  }
  while (!transport->peer_gone(kVictim)) sleep_ms(1);
  sleep_ms(200);
  player.place.wait();
  layer.reset();
  return "good";
}

// The same when NVSHMEM is already waiting for it.
std::string killed_in_nvshmem(const Rank& me) {
  const auto transport = me.join();
  if (me.rank == kVictim) {
    // The agreement that begins allocate_cuda(), and no more.
    agree(*transport, *me.store, "expert_parallel::allocate_cuda",
          {{"allocation", "4096 bytes for a test"}}, generous());
    raise(SIGKILL);
  }
  return error_of([&] { transport->allocate_cuda(me.gpu, 4096, brief(1000), "a test"); });
}

// ---- A rank that is stopped, and goes on when the other has given up and closed its layer.

enum class Point { creation, dispatch, combine, any };
constexpr const char* kPointNames[] = {"creation", "dispatch", "combine", "any"};

struct Stop {
  int nodes;
  Point point;
  bool pushes = false;
};
constexpr Stop kStops[] = {{1, Point::creation},      {1, Point::dispatch}, {1, Point::combine},
                           {1, Point::combine, true}, {1, Point::any},      {1, Point::any, true},
                           {2, Point::dispatch},      {2, Point::combine},  {2, Point::any}};

void stop_and_go_on(const Rank& me, const std::shared_ptr<Transport>& transport, pid_t victim,
                    const Stop& stop) {
  const Player player(me, transport, stop.nodes, stop.pushes);
  const bool survives = me.rank != kVictim;
  const auto at = [&](Point point) {
    if (!survives && point == stop.point) raise(SIGSTOP);
  };
  std::unique_ptr<AllToAll> layer;
  Dispatched held;
  std::thread stopper;
  auto begin = Deadline::Clock::now();
  const std::string error = error_of([&] {
    at(Point::creation);
    layer = player.make_layer(kTimeout);
    held = player.play(*layer, player.rounds[0]);
    if (survives && stop.point == Point::any) {
      stopper = std::thread([=] {
        testing::Random random(static_cast<std::uint64_t>(victim));
        std::this_thread::sleep_for(std::chrono::microseconds(random.below(20000)));
        kill(victim, SIGSTOP);
      });
    }
    for (;;) {
      begin = Deadline::Clock::now();
      at(Point::dispatch);
      player.play(*layer, player.rounds[1], [&] { at(Point::combine); });
    }
  });
  const double seconds = seconds_since(begin);
  layer.reset();
  if (stopper.joinable()) stopper.join();
  if (survives) {
    kill(victim, SIGCONT);
    want(seconds < kInTime, "the error came after " + std::to_string(seconds) + " s: " + error);
  }
  if (stop.point == Point::creation) {
    want(error == "expert_parallel::AllToAll: rank 1 has not arrived within 0.5 s", error);
  } else if (survives) {
    expect_text(error, {": rank 0 waited ", " of rank 1 (", ", stopped"});
  } else {
    expect_text(error, {": rank 0 waited ", " of rank 1 (", "; reported by rank 0"});
  }
  player.play_anew(held);
}

std::string stopped(const Rank& me) {
  check(cudaSetDevice(me.gpu.index));
  const auto transport = me.join();
  if (me.rank == kVictim) me.store->set("test/victim", std::to_string(getpid()));
  const std::optional<std::string> victim = me.store->get("test/victim", generous());
  want(victim.has_value(), "the victim is not there");
  for (const Stop& stop : kStops) {
    const std::string error =
        error_of([&] { stop_and_go_on(me, transport, std::stoi(*victim), stop); });
    if (error.empty()) continue;
    return std::to_string(stop.nodes) + " nodes, at " + kPointNames[int(stop.point)] +
           (stop.pushes ? ", pushed rows: " : ": ") + error;
  }
  return "good";
}

// ---- A rank whose kernels are late. Its host does not wait, closes the layer and makes a new one:
// what the old kernels still write goes where nobody looks. Between nodes the other rank closes
// before it has told of the fault, so that they do everything.

void hold_up_and_close(const Player& player) {
  auto layer = player.make_layer(kTimeout);
  const Dispatched held = player.play(*layer, player.rounds[0]);
  const bool survives = player.me.rank != kVictim;
  const RankDevice late(player.me.gpu);
  const UnwaitedDispatch given(late, player.rounds[1], player.me.rank);
  if (!survives) hold_up(late, 2 * kTimeout);
  const auto begin = Deadline::Clock::now();
  layer->dispatch(given.args);
  want(seconds_since(begin) < 0.3, "the host has waited");
  if (survives && player.problem.nodes == 1) {
    late.wait();
    expect_text(error_of([&] { layer->barrier(false, late.stream()); }),
                {": rank 0 waited ", " of rank 1 (", ", running"});
  }
  layer.reset();
  player.play_anew(held);
  late.wait();
}

std::string late_kernels(const Rank& me) {
  check(cudaSetDevice(me.gpu.index));
  const auto transport = me.join();
  Player(me, transport, 1).play_anew({});  // so that NVSHMEM's heap need not grow within kTimeout
  for (const int nodes : {1, 2}) {
    const std::string error = error_of([&] { hold_up_and_close(Player(me, transport, nodes)); });
    if (!error.empty()) return std::to_string(nodes) + " nodes: " + error;
  }
  return "good";
}

// ---- The tests.

using NvshmemFaults = GpuProcesses;

TEST_F(NvshmemFaults, ARankThatIsKilled) {
  const auto answers = run("killed");
  EXPECT_EQ(answers[kVictim], "killed by signal 9");
  std::istringstream lines(answers[0]);
  std::string line;
  for (const char* operation : {"barrier", "dispatch"}) {
    std::getline(lines, line);
    EXPECT_THAT(
        line, AllOf(StartsWith("expert_parallel::" + std::string(operation) + ": rank 0 waited 0."),
                    HasSubstr(" of rank 1 ("), HasSubstr(", gone")));
  }
  for (int i = 0; i < 2; ++i) {
    std::getline(lines, line);
    EXPECT_THAT(line, AllOf(StartsWith("expert_parallel::nvshmem: rank 1 has ended (process "),
                            HasSubstr("restart all processes")));
  }
  EXPECT_FALSE(std::getline(lines, line)) << line;
}

TEST_F(NvshmemFaults, ARankThatIsKilledInsideNvshmem) {
  const auto answers = run("killed_in_nvshmem");
  EXPECT_THAT(answers[0],
              AllOf(StartsWith("expert_parallel::nvshmem: an allocation of NVSHMEM cannot end: "
                               "rank 1 has ended (process "),
                    HasSubstr(", gone)")));
  EXPECT_EQ(answers[kVictim], "killed by signal 9");
}

TEST_F(NvshmemFaults, ARankThatIsKilledWhileAGraphWaitsForIt) {
  const auto answers = run("killed_in_a_graph");
  EXPECT_EQ(answers[kVictim], "killed by signal 9");
  std::istringstream lines(answers[0]);
  std::string line;
  for (int layer = 0; layer < 2; ++layer) {
    std::getline(lines, line);
    EXPECT_THAT(line, AllOf(StartsWith("expert_parallel::dispatch: rank 0 waited "),
                            HasSubstr(" of rank 1 ("), HasSubstr(", gone")));
  }
  EXPECT_FALSE(std::getline(lines, line)) << line;
}

TEST_F(NvshmemFaults, ARankThatIsStoppedForAWhile) {
  EXPECT_THAT(run("stopped_for_a_while"), Each("good"));
}

TEST_F(NvshmemFaults, ARankThatEndsWhenItHasDoneItsPart) {
  EXPECT_THAT(run("ended_well"), Each("good"));
}

TEST_F(NvshmemFaults, ARankThatIsStoppedAndGoesOn) { EXPECT_THAT(run("stopped"), Each("good")); }

TEST_F(NvshmemFaults, KernelsThatRunWhenTheirLayerIsGone) {
  EXPECT_THAT(run("late_kernels"), Each("good"));
}

}  // namespace
}  // namespace winnow::expert_parallel

int main(int argc, char** argv) {
  using namespace winnow::expert_parallel;  // NOLINT
  return run_tests(argc, argv,
                   {{"killed", killed},
                    {"killed_in_nvshmem", killed_in_nvshmem},
                    {"killed_in_a_graph", killed_in_a_graph},
                    {"stopped_for_a_while", stopped_for_a_while},
                    {"ended_well", ended_well},
                    {"stopped", stopped},
                    {"late_kernels", late_kernels}});
}

#endif
