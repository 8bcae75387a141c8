// Launches: clusters one after the other, their threads in the order of the schedule.
#include "winnow/simulator/launch.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>

#include <sys/mman.h>

#include "winnow/simulator/engine/block.h"
#include "winnow/simulator/engine/device_memory.h"
#include "winnow/simulator/engine/report.h"

namespace winnow::simulator {

Cluster* cluster = nullptr;
Block* block = nullptr;
Thread* current = nullptr;

namespace {

constexpr std::size_t kMostDynamic = 232448;
constexpr unsigned kMostRanks = 2;
// Passes in which threads did nothing but look again.
constexpr int kMostIdlePasses = 2000;

void (*body)(const void* parameters) = nullptr;
std::unique_ptr<Failure> failure;
std::uint64_t ticks = 0;

std::vector<std::unique_ptr<Fiber>>& fibers() {
  static std::vector<std::unique_ptr<Fiber>> all;
  return all;
}

void run_thread(void*) {
  body(block->parameters);
  check_at_exit();
}

bool random_order() { return settings().schedule.kind == Schedule::Kind::random; }

// Completes one operation: the last one, or a random one of those that may be next.
void complete_one() {
  ++statistics().operations;
  --cluster->queued;
  auto& loose = cluster->loose;
  std::vector<std::size_t> ready;
  for (std::size_t i = 0; i < cluster->queues.size(); ++i) {
    if (!cluster->queues[i].empty()) ready.push_back(i);
  }
  const std::uint64_t pick = random_order() ? cluster->random() : 0;
  std::function<void()> operation;
  if (!loose.empty() && (ready.empty() || pick % 2 == 0)) {
    if (random_order()) std::swap(loose[pick / 2 % loose.size()], loose.back());
    operation = std::move(loose.back());
    loose.pop_back();
  } else {
    auto& queue = cluster->queues[ready[pick / 2 % ready.size()]];
    operation = std::move(queue.front());
    queue.pop_front();
  }
  operation();
}

// Warps in the order in which they get their turn.
class Order {
 public:
  explicit Order(std::size_t warps) : warps_(warps) {
    std::iota(warps_.begin(), warps_.end(), std::size_t{0});
  }
  const std::vector<std::size_t>& next() {
    const Schedule& schedule = settings().schedule;
    if (schedule.kind == Schedule::Kind::starved) {
      const std::size_t last = schedule.seed % warps_.size();
      std::stable_partition(warps_.begin(), warps_.end(), [&](std::size_t w) { return w != last; });
    } else if (random_order()) {
      // Priorities that change now and then: some warps run far ahead of others.
      if (turn_++ % 32 == 0) std::shuffle(warps_.begin(), warps_.end(), cluster->random);
    }
    return warps_;
  }
  // Whether the pass goes on with the next warp after one has run.
  bool goes_on(std::size_t warp) const {
    const Schedule& schedule = settings().schedule;
    if (schedule.kind == Schedule::Kind::random) return false;
    return schedule.kind != Schedule::Kind::starved || warp != schedule.seed % warps_.size();
  }

 private:
  std::vector<std::size_t> warps_;
  std::uint64_t turn_ = 0;
};

// Nobody waits for it any more, and with the last one its block is gone.
void end_thread(Thread& thread) {
  Block& its = *block;
  thread.done = true;
  its.known_at_end.join(thread.knowledge.generic);
  leave_cluster_barrier();
  for (const Thread& other : its.all) {
    if (!other.done) return;
  }
  its.ended = true;
}

enum class Ran { nothing, poll, something };

// Lets the threads of a warp run that can. Warps are counted through the blocks of the cluster.
Ran run_warp(std::size_t number) {
  Ran ran = Ran::nothing;
  const std::size_t warps = cluster->blocks.front()->warps.size(), warp = number % warps;
  block = cluster->blocks[number / warps].get();
  for (std::size_t i = 32 * warp; i < std::min<std::size_t>(32 * warp + 32, block->threads); ++i) {
    Thread& thread = block->all[i];
    if (thread.done || !thread.waiting.is_over()) continue;
    const bool polls = thread.waiting.kind == Waiting::Kind::poll;
    ran = std::max(ran, polls ? Ran::poll : Ran::something);
    thread.waiting.kind = Waiting::Kind::nothing;
    current = &thread;
    set_indices(*block, thread.number);
    ++statistics().switches;
    thread.fiber->resume();
    current = nullptr;
    if (failure) return Ran::something;
    if (thread.fiber->finished()) end_thread(thread);
    if (polls && thread.waiting.kind != Waiting::Kind::poll) ran = Ran::something;
  }
  return ran;
}

[[noreturn]] void report_deadlock() {
  std::map<std::string, std::string> waits;  // [what]: the threads
  for (const auto& each : cluster->blocks) {
    for (const Thread& thread : each->all) {
      if (thread.done) continue;
      std::string& who = waits[thread.waiting.describe()];
      std::string warp = "warp " + std::to_string(thread.number / 32);
      if (cluster->ranks() > 1) warp += " of block " + std::to_string(each->rank);
      if (who.find(warp + ",") == std::string::npos) who += warp + ", ";
    }
  }
  std::string text = "no thread can go on:";
  for (const auto& [what, who] : waits) text += "\n  " + who + "wait" + what;
  fail("deadlock", text, {});
}

void run_threads() {
  Order order(cluster->ranks() * cluster->blocks.front()->warps.size());
  int idle = 0;
  for (;;) {
    Ran ran = Ran::nothing;
    for (const std::size_t warp : order.next()) {
      if (!order.goes_on(warp) && ran == Ran::something) break;
      ran = std::max(ran, run_warp(warp));
      if (failure) return;
    }
    const bool waits = cluster->queued > 0;
    if (waits && (ran != Ran::something || (random_order() && cluster->random() % 4 == 0))) {
      complete_one();
      continue;
    }
    if (ran == Ran::something) {
      idle = 0;
      continue;
    }
    if (std::all_of(cluster->blocks.begin(), cluster->blocks.end(),
                    [](const auto& each) { return each->ended; })) {
      return;
    }
    if (ran == Ran::nothing || ++idle == kMostIdlePasses) report_deadlock();
  }
}

// Shared memory of one block after the other: made once, because it must stand at one place.
std::byte* shared_memory(std::size_t bytes) {
  const std::size_t padded = (bytes + 1023) / 1024 * 1024;
  void* const memory = std::aligned_alloc(1024, padded);
  if (memory == nullptr) throw std::bad_alloc();
  return static_cast<std::byte*>(memory);
}
struct SharedMemory {
  std::byte* dynamic = shared_memory(kDynamicBase + kMostDynamic);
  std::byte* fixed = shared_memory(kStaticBytes);
};

// The block takes its place in the cluster, whose size is known.
void prepare(Block& next) {
  static SharedMemory all[kMostRanks];
  const SharedMemory& memory = all[next.rank];
  next.shared = memory.dynamic;
  next.fixed = memory.fixed;
  std::memset(next.shared, 0xff, kDynamicBase + kMostDynamic);
  std::memset(next.fixed, 0xff, kStaticBytes);
  const std::size_t warps = (next.threads + 31) / 32;
  next.warps.resize(warps);
  next.warpgroups.resize((warps + 3) / 4);
  next.named.resize(kNamedBarriers);
  const unsigned ranks = cluster->ranks(), all_threads = ranks * next.threads;
  next.first_barrier =
      static_cast<Actor>(all_threads + ranks * (cluster->groups() + 1) + next.rank * kBarriers);
  next.next_barrier = next.first_barrier;
  next.end_barrier = next.first_barrier + static_cast<Actor>(kBarriers);
  next.dynamic_shadow.reset("shared memory", kDynamicBase, next.dynamic_bytes, &cluster->operations,
                            all_threads);
  next.fixed_shadow.reset("shared memory", kStaticBase, kStaticBytes, &cluster->operations,
                          all_threads);
  for (NamedBarrier& barrier : next.named) {
    barrier.arriving.reset(cluster->actors);
    barrier.ended.reset(cluster->actors);
  }
  while (fibers().size() < all_threads) fibers().push_back(std::make_unique<Fiber>());
  next.all.resize(next.threads);
  for (unsigned i = 0; i < next.threads; ++i) {
    Thread& thread = next.all[i];
    thread.number = i;
    thread.actor = next.rank * next.threads + i;
    thread.fiber = fibers()[thread.actor].get();
    thread.fiber->start(run_thread, nullptr);
    thread.knowledge.reset(cluster->actors);
    thread.knowledge.generic[thread.actor] = 1;
    thread.copied.reset(cluster->actors);
    thread.tensor.reset(cluster->actors);
  }
  next.known_at_end.reset(cluster->actors);
}

// Runs the cluster whose first block is `first`: `ranks` neighbours along x.
void run_cluster(const Grid& grid, const unsigned (&first)[3], const void* parameters,
                 std::size_t parameter_bytes, std::uint64_t seed) {
  Cluster next;
  next.threads = grid.block[0] * grid.block[1] * grid.block[2];
  next.random.seed(seed);
  cluster = &next;
  for (unsigned rank = 0; rank < grid.cluster; ++rank) {
    ++statistics().blocks;
    next.blocks.push_back(std::make_unique<Block>());
    Block& one = *next.blocks.back();
    one.grid = grid;
    one.index[0] = first[0] + rank, one.index[1] = first[1], one.index[2] = first[2];
    one.rank = rank;
    one.threads = next.threads;
    one.parameters = static_cast<const std::byte*>(parameters);
    one.parameter_bytes = parameter_bytes;
    one.dynamic_bytes = grid.shared_bytes;
  }
  next.actors = next.ranks() * (next.threads + next.groups() + 1 + kBarriers);
  next.queues.resize(next.ranks() * (next.groups() + 1));
  next.arriving.reset(next.actors);
  next.ended.reset(next.actors);
  for (const auto& each : next.blocks) prepare(*each);
  block = next.blocks.front().get();
  run_threads();
  if (failure) throw *failure;
  for (const auto& each : next.blocks) {
    block = each.get();
    check_at_exit();
  }
  cluster = nullptr;
  block = nullptr;
}

}  // namespace

Settings& settings() {
  static Settings all;
  return all;
}

Statistics& statistics() {
  static Statistics all;
  return all;
}

unsigned thread_number() { return current->number; }
unsigned block_threads() { return block->threads; }
std::uint64_t clock_ticks() { return ticks += 10'000; }

void poll() { block_until({.kind = Waiting::Kind::poll, .role = "poll"}); }

void block_until(Waiting waiting) {
  if (waiting.kind != Waiting::Kind::poll && waiting.is_over()) return;
  current->waiting = waiting;
  current->fiber->suspend();
}

std::uint64_t record_operation(const char* what, const Where& where) {
  cluster->operations.push_back({{}, current->actor, what, where});
  return cluster->operations.size() - 1;
}

void queue_operation(int queue, std::function<void()> operation) {
  const Schedule::Kind kind = settings().schedule.kind;
  if (kind == Schedule::Kind::eager || kind == Schedule::Kind::starved) {
    ++statistics().operations;
    operation();
    return;
  }
  ++cluster->queued;
  auto queued = [of = block, function = std::move(operation)] {
    block = of;
    function();
  };
  if (queue < 0) {
    cluster->loose.push_back(std::move(queued));
  } else {
    cluster->queues[static_cast<std::size_t>(queue)].push_back(std::move(queued));
  }
}

void fail(const char* check, const std::string& text, const Where& where) {
  std::string report = std::string(check) + ": " + text;
  if (where.line() != 0) report += "\n  at " + line_of(where);
  if (current != nullptr) {
    report += (where.line() != 0 ? ", " : "\n  at ") + std::string("thread ") +
              std::to_string(current->number) + " (warp " + std::to_string(current->number / 32) +
              ")";
  }
  if (block != nullptr) report += "\n  in block " + std::to_string(block->index[0]);
  report += ", schedule " + to_string(settings().schedule);
  auto found = std::make_unique<Failure>(check, report);
  if (current == nullptr) throw *found;
  failure = std::move(found);
  for (;;) current->fiber->suspend();  // for ever
}

void launch(const Grid& grid, void (*kernel)(const void* parameters), const void* parameters,
            std::size_t parameter_bytes) {
  ++statistics().launches;
  body = kernel;
  const unsigned threads = grid.block[0] * grid.block[1] * grid.block[2];
  if (grid.cluster == 0 || grid.cluster > kMostRanks || grid.grid[0] % grid.cluster != 0) {
    throw Failure("launch", "launch: clusters of " + std::to_string(grid.cluster) +
                                " blocks in a grid of " + std::to_string(grid.grid[0]));
  }
  if (threads == 0 || threads > 1024 || grid.shared_bytes > kMostDynamic) {
    throw Failure("launch", "launch: a block of " + std::to_string(threads) + " threads and " +
                                std::to_string(grid.shared_bytes) + " bytes of shared memory");
  }
  std::mt19937_64 random(settings().schedule.seed);
  struct Reset {
    ~Reset() {
      cluster = nullptr;
      block = nullptr;
      current = nullptr;
      failure.reset();
      forget_access();
    }
  } reset;
  for (unsigned z = 0; z < grid.grid[2]; ++z) {
    for (unsigned y = 0; y < grid.grid[1]; ++y) {
      for (unsigned x = 0; x < grid.grid[0]; x += grid.cluster) {
        run_cluster(grid, {x, y, z}, parameters, parameter_bytes, random());
      }
    }
  }
}

}  // namespace winnow::simulator
