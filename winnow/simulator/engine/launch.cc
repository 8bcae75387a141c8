// Launches: blocks one after the other, their threads in the order of the schedule.
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

Block* block = nullptr;
Thread* current = nullptr;

namespace {

constexpr std::size_t kMostDynamic = 232448;
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
  --block->queued;
  auto& loose = block->loose;
  std::vector<std::size_t> ready;
  for (std::size_t i = 0; i < block->queues.size(); ++i) {
    if (!block->queues[i].empty()) ready.push_back(i);
  }
  const std::uint64_t pick = random_order() ? block->random() : 0;
  std::function<void()> operation;
  if (!loose.empty() && (ready.empty() || pick % 2 == 0)) {
    if (random_order()) std::swap(loose[pick / 2 % loose.size()], loose.back());
    operation = std::move(loose.back());
    loose.pop_back();
  } else {
    auto& queue = block->queues[ready[pick / 2 % ready.size()]];
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
      if (turn_++ % 32 == 0) std::shuffle(warps_.begin(), warps_.end(), block->random);
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

enum class Ran { nothing, poll, something };

// Lets the threads of a warp run that can.
Ran run_warp(std::size_t warp) {
  Ran ran = Ran::nothing;
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
    if (thread.fiber->finished()) thread.done = true;
    if (polls && thread.waiting.kind != Waiting::Kind::poll) ran = Ran::something;
  }
  return ran;
}

[[noreturn]] void report_deadlock() {
  std::map<std::string, std::string> waits;  // [what]: the threads
  for (const Thread& thread : block->all) {
    if (thread.done) continue;
    std::string& who = waits[thread.waiting.describe()];
    const std::string warp = "warp " + std::to_string(thread.number / 32);
    if (who.find(warp + ",") == std::string::npos) who += warp + ", ";
  }
  std::string text = "no thread can go on:";
  for (const auto& [what, who] : waits) text += "\n  " + who + "wait" + what;
  fail("deadlock", text, {});
}

void run_threads() {
  Order order(block->warps.size());
  int idle = 0;
  for (;;) {
    Ran ran = Ran::nothing;
    for (const std::size_t warp : order.next()) {
      if (!order.goes_on(warp) && ran == Ran::something) break;
      ran = std::max(ran, run_warp(warp));
      if (failure) return;
    }
    const bool waits = block->queued > 0;
    if (waits && (ran != Ran::something || (random_order() && block->random() % 4 == 0))) {
      complete_one();
      continue;
    }
    if (ran == Ran::something) {
      idle = 0;
      continue;
    }
    if (std::all_of(block->all.begin(), block->all.end(), [](const Thread& t) { return t.done; })) {
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

void prepare(Block& next) {
  static std::byte* const dynamic = shared_memory(kDynamicBase + kMostDynamic);
  static std::byte* const fixed = shared_memory(kStaticBytes);
  next.shared = dynamic;
  next.fixed = fixed;
  std::memset(dynamic, 0xff, kDynamicBase + kMostDynamic);
  std::memset(fixed, 0xff, kStaticBytes);
  const std::size_t warps = (next.threads + 31) / 32;
  next.warps.resize(warps);
  next.warpgroups.resize((warps + 3) / 4);
  next.queues.resize(next.warpgroups.size());
  next.named.resize(kNamedBarriers);
  next.actors = next.threads + next.warpgroups.size() + kBarriers;
  next.next_barrier = next.threads + static_cast<Actor>(next.warpgroups.size());
  next.dynamic_shadow.reset(kDynamicBase, next.dynamic_bytes, &next.operations, next.threads);
  next.fixed_shadow.reset(kStaticBase, kStaticBytes, &next.operations, next.threads);
  for (WarpState& warp : next.warps) {
    warp.arriving.reset(next.actors);
    warp.ended.reset(next.actors);
  }
  for (NamedBarrier& barrier : next.named) {
    barrier.arriving.reset(next.actors);
    barrier.ended.reset(next.actors);
  }
  while (fibers().size() < next.threads) fibers().push_back(std::make_unique<Fiber>());
  next.all.resize(next.threads);
  for (unsigned i = 0; i < next.threads; ++i) {
    Thread& thread = next.all[i];
    thread.number = i;
    thread.fiber = fibers()[i].get();
    thread.fiber->start(run_thread, nullptr);
    thread.knowledge.reset(next.actors);
    thread.knowledge.generic[i] = 1;
    thread.copied.reset(next.actors);
  }
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
  block->operations.push_back({{}, current->number, what, where});
  return block->operations.size() - 1;
}

void queue_operation(int queue, std::function<void()> operation) {
  const Schedule::Kind kind = settings().schedule.kind;
  if (kind == Schedule::Kind::eager || kind == Schedule::Kind::starved) {
    ++statistics().operations;
    operation();
    return;
  }
  ++block->queued;
  if (queue < 0) {
    block->loose.push_back(std::move(operation));
  } else {
    block->queues[static_cast<std::size_t>(queue)].push_back(std::move(operation));
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
  if (threads == 0 || threads > 1024 || grid.shared_bytes > kMostDynamic) {
    throw Failure("launch", "launch: a block of " + std::to_string(threads) + " threads and " +
                                std::to_string(grid.shared_bytes) + " bytes of shared memory");
  }
  std::mt19937_64 random(settings().schedule.seed);
  struct Reset {
    ~Reset() {
      block = nullptr;
      current = nullptr;
      failure.reset();
      forget_access();
    }
  } reset;
  for (unsigned z = 0; z < grid.grid[2]; ++z) {
    for (unsigned y = 0; y < grid.grid[1]; ++y) {
      for (unsigned x = 0; x < grid.grid[0]; ++x) {
        ++statistics().blocks;
        Block next;
        next.grid = grid;
        next.index[0] = x, next.index[1] = y, next.index[2] = z;
        next.threads = threads;
        next.parameters = static_cast<const std::byte*>(parameters);
        next.parameter_bytes = parameter_bytes;
        next.dynamic_bytes = grid.shared_bytes;
        next.random.seed(random());
        prepare(next);
        block = &next;
        run_threads();
        if (failure) throw *failure;
        check_at_exit();
        block = nullptr;
      }
    }
  }
}

}  // namespace winnow::simulator
