// Streams, and the host threads that wait for them: one of those that wait runs the engine.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "winnow/simulator/engine/block.h"
#include "winnow/simulator/engine/device_memory.h"
#include "winnow/simulator/engine/grid.h"

namespace winnow::simulator {
namespace {

// Turns in which threads did nothing but look again, until that counts as a deadlock. Meanwhile
// time passes faster and faster, so that loops with a deadline come to their end.
constexpr int kMostIdleTurns = 2000;
constexpr int kTurnsToDouble = 40;
// How long the engine waits for host threads that may be about to launch more, and how often until
// it says that nothing goes on although some of them do not wait.
constexpr auto kPatience = std::chrono::milliseconds(20);
constexpr int kMostPatience = 3000;

struct Operation {
  std::unique_ptr<GridRun> run = nullptr;  // else:
  std::function<void()> call = nullptr;
  bool always = false;
  std::vector<Ticket> after = {};
};
struct Stream {
  int device;
  std::deque<Operation> operations;  // the first one is that of number ended + 1
  std::uint32_t queued = 0, ended = 0;
  std::vector<Ticket> after;  // of the next operation
};

std::mutex mutex;
std::condition_variable changed;
std::atomic<int> wanting = 0;  // host threads that want the mutex, which the engine then leaves
std::vector<std::unique_ptr<Stream>> streams;
std::map<std::pair<int, const void*>, std::uint32_t> numbers;  // of streams, from 1
std::unique_ptr<Failure> failed;  // what no host thread has been told yet
int hosts = 0;
std::vector<const std::function<bool()>*> waits;  // of host threads: whether they are over
bool is_running = false;
int idle = 0;

class Lock {
 public:
  Lock() {
    ++wanting;
    mutex.lock();
    --wanting;
  }
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
  if (hosts == 0) failed.reset();
  throw thrown;
}

Ticket add(const void* handle, Operation operation) {
  if (all_empty()) begin_session();
  const std::uint32_t number = number_of(handle);
  Stream& stream = stream_of(number);
  operation.after = std::move(stream.after);
  stream.after.clear();
  stream.operations.push_back(std::move(operation));
  idle = 0;
  changed.notify_all();
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
    const Ran ran = run_resident();
    if (any || ran == Ran::something) {
      idle = 0;
      return true;
    }
    if (ran == Ran::nothing) return false;
  } catch (const Failure& failure) {
    failed = std::make_unique<Failure>(failure);
    drop_all();
    return true;
  }
  return ++idle < kMostIdleTurns;
}

void report() {
  try {
    report_deadlock();
  } catch (const Failure& failure) {
    failed = std::make_unique<Failure>(failure);
  }
  drop_all();
}

// Host threads that nothing but the engine lets go on.
int waiting() {
  return static_cast<int>(
      std::count_if(waits.begin(), waits.end(), [](const auto* is_over) { return !(*is_over)(); }));
}

// Host threads that have waited for what has happened, or want something else, come first; and what
// they launch next should be there, so that schedules do not depend on how fast they are.
void let_hosts_go_on(std::unique_lock<std::mutex>& lock) {
  if (wanting > 0) {
    lock.unlock();
    while (wanting > 0) std::this_thread::yield();
    lock.lock();
  }
  if (waits.size() == 1 || waiting() == static_cast<int>(waits.size())) return;
  changed.notify_all();
  changed.wait_for(lock, kPatience, [] { return failed || waiting() >= hosts; });
}

// Runs until `is_over`. False: nothing can go on.
bool run_engine(std::unique_lock<std::mutex>& lock, const std::function<bool()>& is_over) {
  while (!failed && !is_over()) {
    let_hosts_go_on(lock);
    if (failed) break;
    if (!take_turn()) return false;
    // While all wait, and for nothing but time to pass, it passes faster.
    if (idle > 0 && waiting() >= hosts) pass_time(std::uint64_t{10'000} << idle / kTurnsToDouble);
  }
  return true;
}

void wait(const std::function<bool()>& is_over) {
  ++wanting;
  std::unique_lock lock(mutex);
  --wanting;
  struct Waits {
    const std::function<bool()>* mine;
    explicit Waits(const std::function<bool()>* is_over) : mine(is_over) {
      waits.push_back(mine);
      changed.notify_all();
    }
    ~Waits() {
      std::erase(waits, mine);
      changed.notify_all();
    }
  } const waits_here(&is_over);
  for (int patience = 0;;) {
    throw_failure();
    if (is_over()) return;
    if (is_running) {
      changed.wait(lock);
      continue;
    }
    if (waiting() < hosts) changed.wait_for(lock, kPatience, [] { return waiting() >= hosts; });
    if (is_running || failed || is_over()) continue;
    is_running = true;
    const bool goes_on = run_engine(lock, is_over);
    is_running = false;
    changed.notify_all();
    if (goes_on) {
      patience = 0;
    } else if (waiting() >= hosts || ++patience > kMostPatience) {
      report();
    }
  }
}

}  // namespace

bool knows_before(const GridRun& run) {
  return is_over({run.ticket.stream, run.ticket.number - 1});
}

int current_device() { return device_of_thread; }
void set_current_device(int device) { device_of_thread = device; }

Ticket launch(const void* stream, const Grid& grid, void (*kernel)(const void* parameters),
              const void* parameters, std::size_t parameter_bytes) {
  const Lock lock;
  throw_failure();
  ++statistics().launches;
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
  return map_memory(bytes);
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

HostThread::HostThread() {
  const Lock lock;
  ++hosts;
}
HostThread::~HostThread() {
  const Lock lock;
  if (--hosts == 0) failed.reset();
  changed.notify_all();
}

}  // namespace winnow::simulator
