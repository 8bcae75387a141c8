// Ranks that do not come, come when the others have given up, have left their world, or lack memory
// for the rest of their call, in the simulator: what the kernels that wait for them do, and what
// the errors say.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "winnow/core/error.h"
#include "winnow/expert_parallel/all_to_all/all_to_all.h"
#include "winnow/expert_parallel/cuda/view.h"
#include "winnow/expert_parallel/low_latency/low_latency.h"
#include "winnow/expert_parallel/notify/notify.h"
#include "winnow/expert_parallel/testing/low_latency_problem.h"
#include "winnow/expert_parallel/testing/notify_problem.h"
#include "winnow/expert_parallel/testing/ranks.h"
#include "winnow/simulator/kernels/expert_parallel_simulation.h"

namespace winnow::expert_parallel {
namespace {

using simulator::of_argument;
using simulator::of_threads;
using simulator::PlantedBug;
using enum simulator::Plant::Action;
using std::chrono::milliseconds;
using testing::CaseOutcome;

constexpr int kWorld = 4, kAbsent = 2;
constexpr Device kDevice{DeviceType::cuda, 0};

// What a rank is made of: its world's transport and store, and until when it waits.
struct Seat {
  const std::shared_ptr<Transport>& transport;
  std::shared_ptr<Store> store;
  milliseconds timeout;
  int nodes;
};

Config config_of(const Seat& seat) {
  return {.max_tokens = 4,
          .hidden = 16,
          .topk = 2,
          .experts = 2 * kWorld,
          .dtype = DType::f32,
          .local_world_size = kWorld / seat.nodes,
          .timeout = seat.timeout,
          .device = kDevice};
}
Tensor input_of(const RankDevice& place) { return place.copy(Tensor(DType::f32, {4, 16})); }
Tensor indices_of(const RankDevice& place) {
  return place.copy(numbers({4, 2}, [](int i) { return i; }));
}

// A rank that makes calls.
class Player {
 public:
  virtual ~Player() = default;
  // What all ranks do before one is absent.
  virtual void prepare() {}
  virtual void call() = 0;
  // Waits for the kernels, and learns what they have met from further calls.
  virtual void learn() = 0;
};

class AllToAllPlayer : public Player {
 public:
  enum class Call { dispatch, worst_case, combine, barrier, node_barrier };
  AllToAllPlayer(const Seat& seat, Call call)
      : call_(call), layer_(seat.transport, seat.store, config_of(seat)) {}
  void prepare() override {
    if (call_ == Call::combine) dispatch();
  }
  void call() override {
    if (call_ == Call::barrier || call_ == Call::node_barrier) {
      layer_.barrier(call_ == Call::node_barrier, place_.stream());
    } else if (call_ == Call::combine) {
      layer_.combine(
          {.expert_output = layer_.combine_buffer(*got_.descriptor), .stream = place_.stream()},
          *got_.descriptor);
    } else {
      dispatch();
    }
  }
  void learn() override {
    for (int i = 0; i < 2; ++i) {
      place_.wait();
      layer_.barrier(true, place_.stream());
    }
  }

 private:
  void dispatch() {
    got_ = layer_.dispatch({.input = input_,
                            .expert_indices = indices_,
                            .worst_case_rows = call_ == Call::worst_case ? 30 : 0,
                            .stream = place_.stream()});
  }

  Call call_;
  RankDevice place_{kDevice};
  Tensor input_ = input_of(place_), indices_ = indices_of(place_);
  AllToAll layer_;
  Dispatched got_;
};

class NotifyPlayer : public Player {
 public:
  explicit NotifyPlayer(const Seat& seat)
      : shape_{.nodes = seat.nodes, .local_world_size = kWorld / seat.nodes},
        notifier_(seat.transport, seat.store, config(seat)) {}
  void call() override {
    const Tensor indices(DType::i32, {3, shape_.topk});
    NotifyInputs inputs(shape_, indices);
    NotifyOutputs outputs(shape_);
    notify_at(place_, notifier_, make_args(shape_, inputs, outputs), inputs, outputs);
  }
  void learn() override {}

 private:
  NotifierConfig config(const Seat& seat) const {
    NotifierConfig config = shape_.config();
    config.device = kDevice;
    config.timeout = seat.timeout;
    return config;
  }
  NotifyShape shape_;
  RankDevice place_{kDevice};
  Notifier notifier_;
};

class LowLatencyPlayer : public Player {
 public:
  LowLatencyPlayer(const Seat& seat, bool combines, bool shrinks = false)
      : combines_(combines),
        layer_(seat.transport, seat.store, config(seat, shrinks)),
        tensors_(place_, problem_, rounds_[0], seat.transport->rank()) {}
  void prepare() override {
    if (!combines_) return;
    dispatch();
    tensors_.make_expert_output();
  }
  void call() override {
    combines_ ? layer_.combine(tensors_.combine_args(CallPart::both)), void() : dispatch();
  }
  void learn() override {
    place_.wait();
    dispatch();
  }
  LowLatency& layer() { return layer_; }

 private:
  LowLatencyConfig config(const Seat& seat, bool shrinks) const {
    LowLatencyConfig config = problem_.config();
    config.device = kDevice;
    config.timeout = seat.timeout;
    config.enable_shrink = shrinks;
    return config;
  }
  void dispatch() { layer_.dispatch(tensors_.dispatch_args(CallPart::both)); }

  LowLatencyProblem problem_{.name = "absence", .world = kWorld, .max_tokens = 3, .rounds = 1};
  std::vector<LowLatencyRound> rounds_ = make_rounds(problem_);
  bool combines_;
  RankDevice place_{kDevice};
  LowLatency layer_;
  LowLatencyTensors tensors_;
};

// The absent rank comes when the others have given up; or it leaves its world.
enum class Absent { late, gone };
struct Scenario {
  std::string name;
  int nodes;
  Absent absent;
  std::string operation;
  std::function<std::unique_ptr<Player>(const Seat&)> make;
  int absent_ranks = 1;    // from kAbsent on
  bool node_only = false;  // the other nodes do not wait for the absent rank, and call afterwards

  bool is_absent(int rank) const { return rank >= kAbsent && rank < kAbsent + absent_ranks; }
  bool is_elsewhere(int rank) const {
    const int locals = kWorld / nodes;
    return node_only && rank / locals != kAbsent / locals;
  }
  // How many ranks wait for the absent ones.
  int waiting() const { return (node_only ? kWorld / nodes : kWorld) - absent_ranks; }
};

struct Left {};

// Counts a rank once: when it says so, or when it ends, by whatever it ends.
class Counted {
 public:
  explicit Counted(int& ranks) : ranks_(&ranks) {}
  ~Counted() { now(); }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;
  void now() {
    if (ranks_ != nullptr) ++*std::exchange(ranks_, nullptr);
  }

 private:
  int* ranks_;
};

template <class Calls>
std::string error_of(const Calls& calls) {
  try {
    calls();
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

void wait_until(const int& ranks, int are) {
  while (ranks < are) simulator::let_others_run();
}

void compare(CaseOutcome& outcome, int rank, const std::string& text, const std::string& part) {
  const bool passed = text.find(part) != std::string::npos;
  outcome.comparisons.push_back({"rank " + std::to_string(rank), passed ? 0.0 : 1.0, 0, passed,
                                 "\"" + text + "\" without \"" + part + "\""});
}

CaseOutcome run_scenario(const Scenario& scenario) {
  set_device(kWorld, 1);
  // Kernels look for ranks that have ended at every 4096th look at a word.
  simulator::settings().most_idle_turns = scenario.absent == Absent::gone ? 1'000'000 : 20'000;
  RankTeam team(kWorld);
  const bool gone = scenario.absent == Absent::gone;
  std::vector<std::string> texts(kWorld), again(kWorld);
  int prepared = 0, given_up = 0;
  const auto error_of_player = [](Player& player) {
    return error_of([&] {
      player.call();
      player.learn();
    });
  };
  const auto thrown = team.try_run([&](int rank, const std::shared_ptr<Transport>& transport) {
    const auto me = static_cast<std::size_t>(rank);
    Counted is_prepared(prepared), has_given_up(given_up);
    const auto player = scenario.make(
        {transport, team.world().store(), milliseconds(gone ? 600'000 : 300), scenario.nodes});
    player->prepare();
    is_prepared.now();
    wait_until(prepared, kWorld);
    const bool absent = scenario.is_absent(rank);
    if (absent && gone) throw Left();
    if (absent) wait_until(given_up, scenario.waiting());
    // The absent rank, too, tells its peers along the rail.
    if (scenario.is_elsewhere(rank)) wait_until(given_up, kWorld / scenario.nodes);
    texts[me] = error_of_player(*player);
    has_given_up.now();
    again[me] = error_of_player(*player);
  });
  for (const std::exception_ptr& one : thrown) {
    try {
      if (one != nullptr) std::rethrow_exception(one);
    } catch (const Left&) {
    }
  }
  CaseOutcome outcome{Backend::cuda, {}};
  for (int rank = 0; rank < kWorld; ++rank) {
    if (gone && scenario.is_absent(rank)) continue;
    const std::string& text = texts[static_cast<std::size_t>(rank)];
    compare(outcome, rank, text, "expert_parallel::" + scenario.operation + ": rank ");
    // Between nodes a rank may name one that has itself waited for the absent one.
    const bool names_one = scenario.nodes == 1 && scenario.absent_ranks == 1;
    compare(outcome, rank, text, names_one ? " of rank 2 (" : " of rank ");
    compare(outcome, rank, text, gone ? ", its transport is closed" : " waited 0.");
    compare(outcome, rank, again[static_cast<std::size_t>(rank)], text);
  }
  return outcome;
}

// A rank has no memory for what its dispatch returns, which only its host knows: the kernel of the
// fault tells the others. `of_two`: so has rank 3 in its next call, whose kernels have found the
// first fault by then, which its host has not. Then that kernel does nothing.
CaseOutcome run_without_memory(int nodes, bool of_two) {
  constexpr int kSecond = 3;
  set_device(kWorld, 1);
  simulator::settings().most_idle_turns = 20'000;
  RankTeam team(kWorld);
  std::vector<std::string> texts(kWorld), again(kWorld);
  int dispatched = 0, given_up = 0;
  team.run([&](int rank, const std::shared_ptr<Transport>& transport) {
    const auto me = static_cast<std::size_t>(rank);
    Counted has_dispatched(dispatched), has_given_up(given_up);
    const RankDevice place(kDevice);
    const Tensor input = input_of(place), indices = indices_of(place);
    Config config = config_of({transport, team.world().store(), milliseconds(300), nodes});
    config.arena_rows = 1000;  // no call waits for room
    AllToAll layer(transport, team.world().store(), config);
    const auto dispatch = [&](const std::function<void()>& fail) {
      DispatchArgs args{.input = input,
                        .expert_indices = indices,
                        .worst_case_rows = of_two ? 30 : 0,  // for which the host does not wait
                        .copy_out = true,
                        .stream = place.stream()};
      if (fail) {
        args.allocate = [&](DType, std::span<const std::int64_t>) -> Tensor {
          fail();
          throw std::bad_alloc();
        };
      }
      layer.dispatch(args);
    };
    const auto meet = [&] {
      for (int i = 0; i < 2; ++i) {
        layer.barrier(false, place.stream());
        place.wait();
      }
    };
    if (rank == kAbsent) {
      texts[me] = error_of([&] {
        dispatch([&] {
          if (of_two) wait_until(dispatched, kWorld - 1);
        });
      });
    } else {
      dispatch(nullptr);
      if (of_two) {
        place.wait();
        has_dispatched.now();
        wait_until(given_up, rank == kSecond ? 1 : 2);
      }
      texts[me] = error_of([&] {
        if (of_two && rank == kSecond) dispatch([&] { place.wait(); });
        meet();
      });
    }
    has_given_up.now();
    again[me] = error_of(meet);
  });
  CaseOutcome outcome{Backend::cuda, {}};
  for (int rank = 0; rank < kWorld; ++rank) {
    const auto me = static_cast<std::size_t>(rank);
    // The other node's rank on the rail of the second hears nothing.
    const bool waits = of_two && rank == kSecond - kWorld / nodes;
    const int named = of_two && rank == kSecond ? kSecond : kAbsent;
    compare(outcome, rank, texts[me],
            waits ? "expert_parallel::barrier: rank 1 waited 0."
                  : "expert_parallel::dispatch: rank " + std::to_string(named) +
                        ": out of memory in the call");
    compare(outcome, rank, again[me], texts[me]);
  }
  return outcome;
}

testing::Operation absence_operation() {
  std::vector<Scenario> list;
  const auto add = [&](const std::string& name, int nodes, const std::string& operation,
                       const auto& make) {
    const std::string world = std::to_string(nodes) + "x" + std::to_string(kWorld / nodes) + "-";
    list.push_back({world + name + "-late", nodes, Absent::late, operation, make});
    list.push_back({world + name + "-gone", nodes, Absent::gone, operation, make});
  };
  using Call = AllToAllPlayer::Call;
  for (const int nodes : {1, 2, 4}) {
    for (const auto& [name, operation, call] :
         {std::tuple("dispatch", "dispatch", Call::dispatch),
          std::tuple("worst-case", "dispatch", Call::worst_case),
          std::tuple("combine", "combine", Call::combine),
          std::tuple("barrier", "barrier", Call::barrier)}) {
      add(name, nodes, operation,
          [call = call](const Seat& seat) { return std::make_unique<AllToAllPlayer>(seat, call); });
    }
    add("notify", nodes, "notify",
        [](const Seat& seat) { return std::make_unique<NotifyPlayer>(seat); });
  }
  add("node-barrier", 1, "barrier",
      [](const Seat& seat) { return std::make_unique<AllToAllPlayer>(seat, Call::node_barrier); });
  for (const bool combines : {false, true}) {
    add(combines ? "low-latency-combine" : "low-latency-dispatch", 1,
        combines ? "low_latency_combine" : "low_latency_dispatch", [combines](const Seat& seat) {
          return std::make_unique<LowLatencyPlayer>(seat, combines);
        });
  }
  // Two threads of each rank give up at the same time.
  list.push_back({"1x4-low-latency-dispatch-two-late", 1, Absent::late, "low_latency_dispatch",
                  [](const Seat& seat) { return std::make_unique<LowLatencyPlayer>(seat, false); },
                  2});
  // The other node learns of it along the rail alone.
  list.push_back(
      {"2x2-node-barrier-late", 2, Absent::late, "barrier",
       [](const Seat& seat) { return std::make_unique<AllToAllPlayer>(seat, Call::node_barrier); },
       1, true});
  std::vector<testing::Case> cases;
  for (const Scenario& scenario : list) {
    cases.push_back({scenario.name, "",
                     [scenario](const testing::Target&) { return run_scenario(scenario); }, true});
  }
  const auto add_without_memory = [&](const char* name, int nodes, bool of_two) {
    cases.push_back({name, "",
                     [=](const testing::Target&) { return run_without_memory(nodes, of_two); },
                     true});
  };
  add_without_memory("1x4-without-memory", 1, false);
  add_without_memory("2x2-without-memory", 2, false);
  add_without_memory("2x2-two-without-memory", 2, true);
  return {"expert_parallel absence", "ranks that do not come", cases, {}};
}

// A rank that has left the world costs a second or more, where whole blocks look for it.
std::vector<PassingCase> cases(bool quick) {
  std::vector<PassingCase> list;
  int seed = 0;
  for (const auto& one : absence_operation().cases) {
    const bool cheap = one.name.ends_with("late") || one.name.ends_with("memory") ||
                       one.name.starts_with("1x4-low-latency") || one.name == "2x2-barrier-gone";
    if (cheap == quick) list.push_back({one.name, {"random:" + std::to_string(++seed)}});
  }
  return list;
}
const std::vector<PassingCase> kQuickCases = cases(true), kThoroughCases = cases(false);
const RankBugs block{"wait.cuh", "1x4-dispatch-late"},
    thread{"wait.cuh", "1x4-low-latency-combine-late"},
    threads{"wait.cuh", "1x4-low-latency-dispatch-two-late"},
    nodes{"wait.cuh", "2x2-dispatch-late"}, barrier{"fabric_kernels.cuh", "1x4-barrier-late"},
    fabric{"fabric.cuh", "2x2-dispatch-late"}, rail{"fabric.cuh", "2x2-barrier-late"};
// Of signal_fault_kernel alone, which nothing else tells of in time.
const RankBugs signals{"fabric_kernels.cuh", "2x2-node-barrier-late"},
    along_rail{"fabric.cuh", "2x2-node-barrier-late"};
// Of the same kernel, where the host has found the fault.
const RankBugs of_host{"fabric_kernels.cuh", "2x2-without-memory"},
    of_second{"fabric_kernels.cuh", "2x2-two-without-memory"},
    told{"wait.cuh", "1x4-without-memory"}, put_by_host{"fabric.cuh", "2x2-without-memory"};
constexpr const char* kReport = "if (threadIdx.x == 0) report_fault(view, reporter, found);";
constexpr const char* kTold =
    "device::st_release_sys(reinterpret_cast<std::uint64_t*>(control + "
    "view.control_layout.fault),";
constexpr const char* kSignal = "signal_fault_kernel(const __grid_constant__ LayerView view";
constexpr const char* kFlag =
    "device::st_release_sys(reinterpret_cast<std::uint64_t*>(memory.peers";
constexpr const char* kPut = "destination[first + i * step] = word[i];";
PlantedBug eagerly(PlantedBug bug) {
  bug.schedules = {"eager"};
  return bug;
}
const std::vector<PlantedBug> kQuickBugs = {
    block("BlockSomeGiveUp", "if (__syncthreads_or(threadIdx.x == 0 && give_up(look)))", drop),
    barrier("BarrierArrivalNotTold", "device::st_release_sys(", drop),
    race(block("FaultWithoutARelease", kTold, weaken)),
    race(threads("FirstFaultByPlainStores", "if (atomicExch(", weaken)),
    // The notice is read behind the flag, by ranks that still wait.
    eagerly(
        saying("(signal_fault_kernel) (a store", rail("RailFaultWithoutARelease", kFlag, weaken))),
    along_rail("RailFaultNotTold", kFlag, drop),
    told("FaultOfTheHostNotTold", kTold, drop),
    race(told("FaultOfTheHostWithoutARelease", kTold, weaken)),
    race(of_host("FaultOfTheHostPutBeforeItIsThere", kReport, drop, 0, 1)),
};
const std::vector<PlantedBug> kThoroughBugs = {
    block("BlockNoticeNotStored", "view.fault->notice = notice;", undo),
    fabric("RailNoticeNotCopied", "destination[first + i * step] = word[i];", undo),
    block("BlockThereTooEarly", "there = there && device::ld_acquire_sys(word_of(i))", add, 1),
    block("BlockFaultOfNobody", "const std::uint64_t signalled = device::ld_acquire_sys(", add, 1),
    block("BlockFaultNotTold", kTold, drop),
    thread("ThreadThereTooEarlyForOne", "seen = device::ld_acquire_sys(word);", add, 1),
    thread("ThreadThereAtOnce", "const There& there, std::uint64_t value, Phase phase, int peer) {",
           add, 1, 1),
    along_rail("RailFaultOfTheNextReporter", kFlag, add, 1),
    along_rail("RailNoticeNotPut", kPut, undo),
    along_rail("RailNoticePutBehind", kPut, move, 16),
    of_threads(1, 2, along_rail("RailNoticeWithoutItsEnd", kPut, undo)),
    of_argument(1, signals("SignalOfTheNextReporter", kSignal, launch_argument, 1)),
    of_argument(1, signals("SignalOfTheReporterBefore", kSignal, launch_argument, -1)),
    of_argument(0, signals("SignalToFewerNodes", kSignal, launch_argument, -1),
                offsetof(LayerView, topology.nodes), sizeof(int)),
    of_argument(0, signals("SignalFromTheNextNode", kSignal, launch_argument, 1),
                offsetof(LayerView, topology.node), sizeof(int)),
    of_argument(0, signals("SignalAlongTheNextRail", kSignal, launch_argument, 1),
                offsetof(LayerView, topology.local), sizeof(int)),
    of_argument(0, signals("SignalInTheNextWord", kSignal, launch_argument, 8),
                offsetof(LayerView, control_layout.fault), sizeof(std::int64_t)),
    of_argument(0, signals("SignalOfTheNextNotice", kSignal, launch_argument, sizeof(FaultNotice)),
                offsetof(LayerView, control.local), sizeof(std::byte*)),
    of_argument(0, signals("SignalToTheNextRank", kSignal, launch_argument, sizeof(std::byte*)),
                offsetof(LayerView, control.peers), sizeof(std::byte*)),
    of_argument(2, signals("SignalAsIfTheHostHadFoundIt", kSignal, launch_argument, 1),
                offsetof(FaultNotice, phase), sizeof(Phase)),
    signals("SignalThreadsOneFurther", kSignal, shift_thread, 1),
    signals("SignalAside", kSignal, launch_astray),
    of_host("FaultOfTheHostBrokenBeforeAllLook", "if (broken(view)) return;", drop, 0, 1),
    of_argument(1, of_host("FaultOfTheHostOfTheNextRank", kSignal, launch_argument, 1)),
    of_argument(2,
                of_host("FaultOfTheHostTakenForAKernels", kSignal, launch_argument,
                        -static_cast<std::int64_t>(Phase::memory)),
                offsetof(FaultNotice, phase), sizeof(Phase)),
    of_host("FaultOfTheHostByNoThread", kSignal, shift_thread, 1),
    told("FaultOfTheHostWithoutANotice", "view.control_layout.notice(reporter)) = notice;", undo),
    put_by_host("FaultOfTheHostNotPut", kPut, undo),
    put_by_host("FaultOfTheHostNotSignalled", kFlag, drop),
    // As if the words behind `broken` said whether a kernel has found one.
    of_argument(0, of_second("FaultOfTheHostInsteadOfAKernels", kSignal, launch_argument, 4),
                offsetof(LayerView, state), sizeof(CudaState*)),
    fabric("RailNoticeOfTheNextWord", "word[i] = source[first + i * step];", misread, 16),
    nodes("NodesSomeGiveUpBetweenNodes", "if (__syncthreads_or(threadIdx.x == 0 && give_up(", drop),
};
WINNOW_SIMULATOR_TESTS(SimulatorAbsence, absence_operation(), kQuickCases, kThoroughCases,
                       kQuickBugs, kThoroughBugs);

}  // namespace
}  // namespace winnow::expert_parallel
