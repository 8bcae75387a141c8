// Streams, and the host threads that wait for them: one of those that wait runs the engine.
#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <ctime>
#include <deque>
#include <limits>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <dlfcn.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "winnow/simulator/engine/block.h"
#include "winnow/simulator/engine/device_memory.h"
#include "winnow/simulator/engine/grid.h"
#include "winnow/simulator/engine/report.h"

namespace winnow::simulator {
namespace {

// What a turn takes. While nothing changes time passes faster and faster, so that loops with a
// deadline come to their end.
constexpr std::uint64_t kNanoseconds = 200, kMostNanoseconds = 250'000;
constexpr int kTurnsToDouble = 100;
// And what a round takes in which hosts look and nothing can go on: at least this, and a part of
// what those before it in a row have taken. So a deadline ends after some hundred of them, and is
// hardly exceeded; behind the longest one, they count as a deadlock.
constexpr std::uint64_t kNanosecondsOfLooks = 50'000, kPartOfLooks = 64;
constexpr std::uint64_t kMostNanosecondsOfLooks = 3'600'000'000'000;

struct Operation {
  std::unique_ptr<GridRun> run = nullptr;  // else:
  std::function<void()> call = nullptr;
  bool always = false;
  std::vector<Ticket> after = {};
  Horizon behind = {};  // what has ended when it begins
};
struct Stream {
  int device;
  std::deque<Operation> operations;  // the first one is that of number ended + 1
  std::uint32_t queued = 0, ended = 0;
  std::vector<Ticket> after;  // of the next operation
};

std::mutex mutex;
std::vector<std::unique_ptr<Stream>> streams;
std::map<std::pair<int, const void*>, std::uint32_t> numbers;  // of streams, from 1
std::unique_ptr<Failure> failed;  // what no host thread has been told yet
int idle = 0;

// Host threads of a team (run_hosts()) take turns: one runs until it waits.
struct Host {
  int number;
  std::condition_variable turn;
  // What it waits for. Null: it has let the others run.
  const std::function<bool()>* is_over = nullptr;
  std::uint64_t round = 0;  // in which it last let the others run
  bool ended = false;
};
std::vector<std::unique_ptr<Host>> team;  // empty: there is none
std::size_t last_host = 0;
const Host* running = nullptr;  // null while the team begins
std::uint64_t round_of_team = 0;
std::uint64_t looked = 0;  // what rounds in a row have taken in which nothing could go on
thread_local Host* own = nullptr;
std::uint64_t begin_of_team = 0;  // by the machine's clock, less the simulated one

std::uint64_t machine_clock() {
  timespec now;
  syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 +
         static_cast<std::uint64_t>(now.tv_nsec);
}

class Lock {
 public:
  Lock() { mutex.lock(); }
  ~Lock() { mutex.unlock(); }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
};

thread_local int device_of_thread = 0;

Stream& stream_of(std::uint32_t number) { return *streams[number - 1]; }

std::uint32_t number_of(const void* handle) {
  std::uint32_t& number = numbers[{device_of_thread, handle}];
  if (number == 0) {
    streams.push_back(std::make_unique<Stream>());
    streams.back()->device = device_of_thread;
    number = static_cast<std::uint32_t>(streams.size());
  }
  return number;
}

bool is_over(Ticket ticket) {
  return ticket.stream == 0 || stream_of(ticket.stream).ended >= ticket.number;
}

bool all_empty() {
  for (const auto& stream : streams) {
    if (!stream->operations.empty()) return false;
  }
  return true;
}

void throw_failure() {
  if (!failed) return;
  const Failure thrown = *failed;
  if (team.empty()) failed.reset();
  throw thrown;
}

// Raises it to the other, which has no more streams.
void join(Horizon& horizon, const Horizon& other) {
  for (std::size_t i = 0; i < other.size(); ++i) horizon[i] = std::max(horizon[i], other[i]);
}

// Raises it to what has ended when the operation has, if it has not yet.
void learn(Horizon& horizon, Ticket ticket) {
  if (is_over(ticket)) return;
  const Stream& stream = stream_of(ticket.stream);
  join(horizon, stream.operations[ticket.number - stream.ended - 1].behind);
  horizon[ticket.stream] = std::max(horizon[ticket.stream], ticket.number);
}

// Of an operation that is queued behind `before`: what has ended by now, for which the host may
// have waited, what it waits for, and what is ahead of it. A kernel that begins early knows no more
// than that ahead of it did when it began.
void set_horizons(Operation& operation, Ticket before) {
  Horizon horizon(streams.size() + 1);
  for (std::size_t i = 0; i < streams.size(); ++i) horizon[i + 1] = streams[i]->ended;
  for (const Ticket ticket : operation.after) learn(horizon, ticket);
  Horizon early = horizon;
  learn(horizon, before);
  operation.behind = horizon;
  if (!operation.run) return;
  GridRun& run = *operation.run;
  run.told_early = told_to_host();
  run.behind = run.behind_early = run.lets->behind = std::make_shared<Horizon>(horizon);
  if (!run.grid.early || is_over(before)) return;
  const GridRun* const ahead = stream_of(before.stream).operations.back().run.get();
  if (ahead == nullptr) return;
  join(early, *ahead->behind_early);
  run.behind_early = std::make_shared<Horizon>(std::move(early));
  run.ahead = ahead->lets;
}

Ticket add(const void* handle, Operation operation) {
  if (all_empty()) begin_session();
  const std::uint32_t number = number_of(handle);
  Stream& stream = stream_of(number);
  operation.after = std::move(stream.after);
  stream.after.clear();
  set_horizons(operation, {number, stream.queued});
  stream.operations.push_back(std::move(operation));
  idle = 0;
  return {number, ++stream.queued};
}

// ---- The engine --------------------------------------------------------------------------------

bool is_ready(const Operation& operation) {
  for (const Ticket ticket : operation.after) {
    if (!is_over(ticket)) return false;
  }
  return true;
}

// Makes clusters of the grid resident while there is room.
bool begin_clusters(GridRun& run) {
  bool any = false;
  while (run.begun < run.clusters && resident_clusters(run.device) < settings().resident_clusters) {
    begin_cluster(run);
    any = true;
  }
  return any;
}

// Whether an operation began or ended.
bool advance(Stream& stream) {
  bool any = false;
  while (!stream.operations.empty() && is_ready(stream.operations.front())) {
    Operation& first = stream.operations.front();
    if (first.run && first.run->left > 0) break;
    if (first.call) first.call();
    stream.operations.pop_front();
    ++stream.ended;
    any = true;
  }
  // Behind a grid that runs, those that may begin early.
  for (Operation& operation : stream.operations) {
    if (!operation.run || !is_ready(operation)) break;
    GridRun& run = *operation.run;
    const bool is_first = &operation == &stream.operations.front();
    if (!is_first && !run.grid.early) break;
    if (!is_first && settings().schedule.kind == Schedule::Kind::late) break;
    any = begin_clusters(run) || any;
    if (run.held_back > 0) break;
  }
  return any;
}

void drop_all() {
  drop_resident();
  for (const auto& stream : streams) {
    for (Operation& operation : stream->operations) {
      if (operation.always) operation.call();
    }
    stream->ended = stream->queued;
    stream->operations.clear();
    stream->after.clear();
  }
}

// One turn of all that is resident. False: nothing can go on.
bool take_turn() {
  try {
    bool any = false;
    for (const auto& stream : streams) any = advance(*stream) || any;
    const std::uint64_t before = changes;
    const Ran ran = run_resident();
    if (any || changes != before) {
      idle = 0;
      return true;
    }
    if (ran == Ran::nothing) return false;
  } catch (const Failure& failure) {
    failed = std::make_unique<Failure>(failure);
    drop_all();
    return true;
  }
  return ++idle < settings().most_idle_turns;
}

void report() {
  try {
    report_deadlock();
  } catch (const Failure& failure) {
    failed = std::make_unique<Failure>(failure);
  }
  drop_all();
}

// Takes turns until `is_over`, at most `most`. False: nothing can go on.
bool run_engine(const std::function<bool()>& is_over, int most) {
  for (int turn = 0; turn < most && !failed && !is_over(); ++turn) {
    if (!take_turn()) return false;
    pass_time(std::min(kNanoseconds << std::min(idle / kTurnsToDouble, 32), kMostNanoseconds));
  }
  return true;
}

bool may_run(const Host& host) {
  if (host.ended) return false;
  if (host.is_over == nullptr) return host.round < round_of_team;
  return failed || (*host.is_over)();
}
bool lets_run(const Host& host) { return !host.ended && host.is_over == nullptr; }

// Gives the turn to a host thread that may run. Until there is one, the engine runs.
void pass_turn() {
  constexpr int kTurns = 8;  // of the engine, before those look again that have let it run
  for (;;) {
    for (std::size_t i = 1; i <= team.size(); ++i) {
      Host& host = *team[(last_host + i) % team.size()];
      if (!may_run(host)) continue;
      last_host = (last_host + i) % team.size();
      running = &host;
      host.turn.notify_one();
      return;
    }
    if (std::all_of(team.begin(), team.end(), [](const auto& host) { return host->ended; })) return;
    ++round_of_team;
    const bool some_look =
        std::any_of(team.begin(), team.end(), [](const auto& host) { return lets_run(*host); });
    const auto some_run = [] {
      return std::any_of(team.begin(), team.end(), [](const auto& host) {
        return host->is_over != nullptr && may_run(*host);
      });
    };
    // Behind a failure those that look learn of it in time, too.
    if (!failed && run_engine(some_run, some_look ? kTurns : std::numeric_limits<int>::max())) {
      looked = 0;
    } else if (!some_look || looked > kMostNanosecondsOfLooks) {
      looked = 0;
      report();
    } else {
      const std::uint64_t more = std::max(kNanosecondsOfLooks, looked / kPartOfLooks);
      pass_time(more);
      looked += more;
    }
  }
}

void wait_in_team(std::unique_lock<std::mutex>& lock, const std::function<bool()>* is_over) {
  own->is_over = is_over;
  own->round = round_of_team;
  pass_turn();
  own->turn.wait(lock, [] { return running == own; });
}

void wait(const std::function<bool()>& is_over) {
  std::unique_lock lock(mutex);
  throw_failure();
  if (is_over()) return;
  if (own != nullptr) {
    wait_in_team(lock, &is_over);
  } else {
    if (!run_engine(is_over, std::numeric_limits<int>::max())) report();
  }
  throw_failure();
}

}  // namespace

bool knows_before(const GridRun& run) {
  return is_over({run.ticket.stream, run.ticket.number - 1});
}

int current_device() { return device_of_thread; }
void set_current_device(int device) { device_of_thread = device; }

Ticket launch(const void* stream, const Grid& given, void (*kernel)(const void* parameters),
              const void* parameters, std::size_t parameter_bytes) {
  const Lock lock;
  throw_failure();
  ++statistics().launches;
  Grid grid = given;
  if (detail::any_planted) alter_launch(noted_kernel(), grid, stream);
  check_launch(grid);
  auto run = std::make_unique<GridRun>();
  run->grid = grid;
  run->kernel = kernel;
  constexpr std::size_t kAlignment = 64;  // of tensor maps
  run->parameters.reset(static_cast<std::byte*>(std::aligned_alloc(
      kAlignment, (parameter_bytes + kAlignment - 1) / kAlignment * kAlignment)));
  std::memcpy(run->parameters.get(), parameters, parameter_bytes);
  run->parameter_bytes = parameter_bytes;
  run->device = device_of_thread;
  run->number = statistics().launches;
  run->function = noted_kernel();
  note_launch(run->number, run->function);
  run->gpu = static_cast<unsigned>(device_of_thread) +
             (own == nullptr ? 0u : 1u << 16 | static_cast<unsigned>(own->number));
  run->random.seed(settings().schedule.seed);
  run->held_back = grid.grid[0] * grid.grid[1] * grid.grid[2];
  run->left = run->clusters = run->held_back / grid.cluster;
  GridRun* const queued = run.get();
  return queued->ticket = add(stream, {.run = std::move(run)});
}

Ticket enqueue(const void* stream, std::function<void()> operation, bool always) {
  const Lock lock;
  if (!always) throw_failure();
  return add(stream, {.call = std::move(operation), .always = always});
}

Ticket last_operation(const void* stream) {
  const Lock lock;
  const std::uint32_t number = number_of(stream);
  return {number, stream_of(number).queued};
}

void wait_in_stream(const void* stream, Ticket ticket) {
  const Lock lock;
  stream_of(number_of(stream)).after.push_back(ticket);
}

bool has_ended(Ticket ticket) {
  const Lock lock;
  return is_over(ticket);
}

void synchronize(Ticket ticket) {
  wait([ticket] { return is_over(ticket); });
}

void synchronize_device() {
  wait([device = device_of_thread] {
    for (const auto& stream : streams) {
      if (stream->device == device && !stream->operations.empty()) return false;
    }
    return true;
  });
}

void synchronize_all() { wait(all_empty); }

void wait_until(const std::function<bool()>& is_over) { wait(is_over); }

void* allocate(std::size_t bytes) {
  const Lock lock;
  return map_memory(bytes, false);
}

void* allocate_of_host(std::size_t bytes) {
  const Lock lock;
  return map_memory(bytes, true);
}

void free(void* memory) {
  if (memory == nullptr) return;
  try {
    synchronize_all();
  } catch (const Failure& failure) {
    const Lock lock;
    failed = std::make_unique<Failure>(failure);
  }
  const Lock lock;
  unmap_memory(memory);
}

void free_in_stream(void* memory, const void* stream) {
  enqueue(stream, [memory] { unmap_memory(memory); }, true);
}

void copy_in_stream(void* to, const void* from, std::size_t bytes, const void* stream) {
  const bool from_device = [&] {
    const Lock lock;
    return is_allocated(from, bytes);
  }();
  std::vector<std::byte> held;
  const auto* const begin = static_cast<const std::byte*>(from);
  if (!from_device) held.assign(begin, begin + bytes);
  enqueue(stream, [to, from, bytes, from_device, held = std::move(held)] {
    std::memcpy(to, from_device ? from : held.data(), bytes);
  });
}

void fill_in_stream(void* memory, std::size_t pitch, int value, std::size_t width,
                    std::size_t height, const void* stream) {
  enqueue(stream, [=] {
    for (std::size_t row = 0; row < height; ++row) {
      std::memset(static_cast<std::byte*>(memory) + row * pitch, value, width);
    }
  });
}

bool look(Ticket ticket) {
  const Lock lock;
  throw_failure();
  return is_over(ticket);
}

bool let_others_run() {
  if (own == nullptr) return false;
  std::unique_lock lock(mutex);
  wait_in_team(lock, nullptr);
  return true;
}

void run_hosts(int count, const std::function<void(int)>& body) {
  {
    const Lock lock;
    for (int number = 0; number < count; ++number) {
      team.push_back(std::make_unique<Host>());
      team.back()->number = number;
    }
    last_host = 0;
    round_of_team = 1;  // so that all may run
    looked = 0;
    begin_of_team = machine_clock() - pass_time(0);
    running = team.front().get();
  }
  std::vector<std::thread> threads;
  for (int number = 0; number < count; ++number) {
    threads.emplace_back([&body, number] {
      own = team[static_cast<std::size_t>(number)].get();
      {
        std::unique_lock lock(mutex);
        own->turn.wait(lock, [] { return running == own; });
      }
      body(number);
      const Lock lock;
      own->ended = true;
      pass_turn();
    });
  }
  for (std::thread& thread : threads) thread.join();
  const Lock lock;
  team.clear();
  running = nullptr;
  failed.reset();
}

}  // namespace winnow::simulator

// Where code of the library lets other threads run, or waits for them, a host thread of a team
// gives up its turn; and it has the clock of kernels, so that deadlines expire in the same turn
// however fast the machine is.
extern "C" {

[[gnu::visibility("default")]]  // for the C++ library, whose clocks call it
int clock_gettime(clockid_t clock, timespec* now) noexcept {
  if (winnow::simulator::own == nullptr || clock != CLOCK_MONOTONIC) {
    return static_cast<int>(syscall(SYS_clock_gettime, clock, now));
  }
  constexpr std::uint64_t kOfASecond = 1'000'000'000;
  const std::uint64_t since = winnow::simulator::begin_of_team + winnow::simulator::pass_time(1);
  *now = {static_cast<time_t>(since / kOfASecond), static_cast<long>(since % kOfASecond)};
  return 0;
}

int sched_yield() noexcept {
  return winnow::simulator::let_others_run() ? 0 : static_cast<int>(syscall(SYS_sched_yield));
}

int nanosleep(const timespec* wanted, timespec* left) {
  if (winnow::simulator::let_others_run()) return 0;
  return static_cast<int>(syscall(SYS_nanosleep, wanted, left));
}

int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* held, clockid_t clock,
                           const timespec* until) {
  if (winnow::simulator::own != nullptr) {
    pthread_mutex_unlock(held);
    winnow::simulator::let_others_run();
    pthread_mutex_lock(held);
    timespec now;
    clock_gettime(clock, &now);
    const bool is_over =
        std::pair(now.tv_sec, now.tv_nsec) >= std::pair(until->tv_sec, until->tv_nsec);
    return is_over ? ETIMEDOUT : 0;
  }
  static const auto next = reinterpret_cast<decltype(&pthread_cond_clockwait)>(
      dlsym(RTLD_NEXT, "pthread_cond_clockwait"));
  return next(condition, held, clock, until);
}

}  // extern "C"
