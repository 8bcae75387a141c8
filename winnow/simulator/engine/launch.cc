// Clusters that are resident run side by side, their threads in the order of the schedule.
#include "winnow/simulator/launch.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <string>

#include <sys/mman.h>

#include "winnow/simulator/engine/block.h"
#include "winnow/simulator/engine/device_memory.h"
#include "winnow/simulator/engine/grid.h"
#include "winnow/simulator/engine/report.h"

namespace winnow::simulator {

Cluster* cluster = nullptr;
Block* block = nullptr;
Thread* current = nullptr;
std::uint64_t changes = 0;

namespace {

constexpr std::size_t kMostDynamic = 232448;
// Turns for which a random schedule prefers the same clusters.
constexpr std::uint64_t kTurns = 64;

std::unique_ptr<Failure> failure;
std::uint64_t ticks = 0;

// In the order in which they began; random schedules change it.
std::vector<std::unique_ptr<Cluster>> resident;
std::mt19937_64 random_clusters;
std::uint64_t turn = 0;

void run_thread(void*) {
  cluster->run->kernel(block->parameters);
  check_at_exit();
}

bool random_order() { return settings().schedule.kind == Schedule::Kind::random; }

// Completes one operation: the last one, or a random one of those that may be next.
void complete_one() {
  ++changes;
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

// The warps of the cluster in the order in which they get their turn.
const std::vector<std::size_t>& next_order() {
  std::vector<std::size_t>& warps = cluster->order;
  const Schedule& schedule = settings().schedule;
  if (schedule.kind == Schedule::Kind::starved) {
    const std::size_t last = schedule.seed % warps.size();
    std::stable_partition(warps.begin(), warps.end(), [&](std::size_t w) { return w != last; });
  } else if (random_order()) {
    // Priorities that change now and then: some warps run far ahead of others.
    if (cluster->turn++ % 32 == 0) std::shuffle(warps.begin(), warps.end(), cluster->random);
  }
  return warps;
}
// Whether the pass goes on with the next warp after one has run.
bool goes_on(std::size_t warp) {
  const Schedule& schedule = settings().schedule;
  if (schedule.kind == Schedule::Kind::random) return false;
  return schedule.kind != Schedule::Kind::starved || warp != schedule.seed % cluster->order.size();
}

// Nobody waits for it any more, and with the last one its block is gone.
void end_thread(Thread& thread) {
  Block& its = *block;
  thread.done = true;
  ++cluster->ended_threads;
  its.known_at_end.join(thread.knowledge.generic);
  leave_named_barriers();
  leave_cluster_barrier();
  for (const Thread& other : its.all) {
    if (!other.done) return;
  }
  its.ended = true;
  ++changes;
}

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
    settle_store();
    if (thread.fiber->finished()) end_thread(thread);
    if (polls && thread.waiting.kind != Waiting::Kind::poll) ran = Ran::something;
  }
  return ran;
}

// One pass over the cluster's warps; or an operation is completed, which counts as something.
Ran run_pass() {
  Ran ran = Ran::nothing;
  for (const std::size_t warp : next_order()) {
    if (!goes_on(warp) && ran == Ran::something) break;
    ran = std::max(ran, run_warp(warp));
    if (failure) return Ran::something;
  }
  const bool waits = cluster->queued > 0;
  if (waits && (ran != Ran::something || (random_order() && cluster->random() % 4 == 0))) {
    complete_one();
    return Ran::something;
  }
  return ran;
}

bool has_ended(const Cluster& one) {
  return one.queued == 0 && std::all_of(one.blocks.begin(), one.blocks.end(),
                                        [](const auto& each) { return each->ended; });
}

using SharedMemory = std::unique_ptr<std::byte, decltype(&std::free)>;
SharedMemory shared_memory(std::size_t bytes) {
  const std::size_t padded = (bytes + 1023) / 1024 * 1024;
  void* const memory = std::aligned_alloc(1024, padded);
  if (memory == nullptr) throw std::bad_alloc();
  return {static_cast<std::byte*>(memory), std::free};
}

}  // namespace

// What a cluster needs as long as it is resident; the next one takes it over.
struct Slot {
  struct Shared {
    SharedMemory dynamic = shared_memory(kDynamicBase + kMostDynamic);
    SharedMemory fixed = shared_memory(kStaticBytes);
  };
  std::vector<Shared> shared;  // of each rank
  std::vector<std::unique_ptr<Fiber>> fibers;
  bool is_taken = false;
};

namespace {

Slot* take_slot(unsigned ranks, std::size_t threads) {
  static std::vector<std::unique_ptr<Slot>> slots;
  std::size_t i = 0;
  while (i < slots.size() && slots[i]->is_taken) ++i;
  if (i == slots.size()) slots.push_back(std::make_unique<Slot>());
  Slot& slot = *slots[i];
  slot.is_taken = true;
  while (slot.shared.size() < ranks) slot.shared.emplace_back();
  while (slot.fibers.size() < threads) slot.fibers.push_back(std::make_unique<Fiber>());
  return &slot;
}

// The block takes its place in the cluster, whose size is known.
void prepare(Block& next) {
  const GridRun& run = *cluster->run;
  const Slot::Shared& memory = cluster->slot->shared[next.rank];
  next.shared = memory.dynamic.get();
  next.fixed = memory.fixed.get();
  std::memset(next.shared, 0xff, kDynamicBase + next.dynamic_bytes);
  const std::size_t warps = (next.threads + 31) / 32;
  next.warps.resize(warps);
  next.warpgroups.resize((warps + 3) / 4);
  next.named.resize(kNamedBarriers);
  const unsigned ranks = cluster->ranks(), all_threads = ranks * next.threads;
  next.first_barrier =
      static_cast<Actor>(all_threads + ranks * (cluster->warps() + 1) + next.rank * kBarriers);
  next.next_barrier = next.first_barrier;
  next.end_barrier = next.first_barrier + static_cast<Actor>(kBarriers);
  next.dynamic_shadow.reset("shared memory", kDynamicBase, next.dynamic_bytes, &cluster->operations,
                            all_threads);
  next.fixed_shadow.reset("shared memory", kStaticBase, 0, &cluster->operations, all_threads);
  for (NamedBarrier& barrier : next.named) {
    barrier.arriving.reset(cluster->actors);
    barrier.ended.reset(cluster->actors);
  }
  const Told told = told_to_kernels(run.told_early);
  next.all.resize(next.threads);
  for (unsigned i = 0; i < next.threads; ++i) {
    Thread& thread = next.all[i];
    thread.number = i;
    thread.actor = next.rank * next.threads + i;
    thread.fiber = cluster->slot->fibers[thread.actor].get();
    thread.fiber->start(run_thread, nullptr);
    thread.knowledge.reset(cluster->actors, thread.actor);
    thread.knowledge.hear(cluster->number, told);
    thread.knowledge.generic.advance();
    thread.copied.reset(cluster->actors);
    thread.tensor.reset(cluster->actors, thread.actor);
  }
  next.known_at_end.reset(cluster->actors);
}

// The cluster whose first block is `first`: neighbours along x.
std::unique_ptr<Cluster> make_cluster(GridRun& run, const unsigned (&first)[3]) {
  const Grid& grid = run.grid;
  auto made = std::make_unique<Cluster>();
  Cluster& next = *made;
  next.run = &run;
  next.threads = grid.block[0] * grid.block[1] * grid.block[2];
  next.random.seed(run.random());
  cluster = &next;
  for (unsigned rank = 0; rank < grid.cluster; ++rank) {
    ++statistics().blocks;
    next.blocks.push_back(std::make_unique<Block>());
    Block& one = *next.blocks.back();
    one.grid = grid;
    one.index[0] = first[0] + rank, one.index[1] = first[1], one.index[2] = first[2];
    one.rank = rank;
    one.threads = next.threads;
    one.parameters = run.parameters.get();
    one.parameter_bytes = run.parameter_bytes;
    one.dynamic_bytes = grid.shared_bytes;
  }
  next.actors = next.ranks() * next.actors_of_block() + 1;
  next.number = number_cluster(run, first, next.threads, next.kernel_before());
  next.queues.resize(next.ranks() * (next.groups() + 1));
  next.arriving.reset(next.actors);
  next.ended.reset(next.actors);
  next.slot = take_slot(next.ranks(), next.ranks() * next.threads);
  for (const auto& each : next.blocks) prepare(*each);
  next.order.resize(next.ranks() * next.blocks.front()->warps.size());
  std::iota(next.order.begin(), next.order.end(), std::size_t{0});
  return made;
}

void leave() {
  cluster = nullptr;
  block = nullptr;
  current = nullptr;
}

// The cluster that runs has ended.
void end_cluster() {
  for (const auto& each : cluster->blocks) {
    block = each.get();
    check_at_exit();
  }
  GridRun& run = *cluster->run;
  for (const auto& each : cluster->blocks) {
    if (!each->lets_next) {
      --run.held_back;
      each->known_at_end.tell(cluster->number, run.lets->reads);
    }
    run.told_at_end.join(each->known_at_end.others());
  }
  if (--run.left == 0) note_end(run.ticket, run.told_at_end);
}

}  // namespace

Cluster::~Cluster() {
  if (slot != nullptr) slot->is_taken = false;
}

unsigned resident_clusters(int device) {
  return static_cast<unsigned>(
      std::count_if(resident.begin(), resident.end(),
                    [&](const auto& one) { return one->run->device == device; }));
}

void begin_cluster(GridRun& run) {
  const Grid& grid = run.grid;
  if (run.begun == 0) {
    if (run.ahead && run.ahead->have_waited) run.behind_early = run.ahead->behind;
    if (run.ahead) run.lets->reads.join(run.ahead->reads);
    run.told_early.join(told_before(*run.behind_early));
  }
  const unsigned along = grid.grid[0] / grid.cluster, number = run.begun++;
  resident.push_back(
      make_cluster(run, {number % along * grid.cluster, number / along % grid.grid[1],
                         number / along / grid.grid[1]}));
  leave();
}

Ran run_resident() {
  Ran ran = Ran::nothing;
  const bool random = random_order();
  if (random && turn++ % kTurns == 0) {
    std::shuffle(resident.begin(), resident.end(), random_clusters);
  }
  for (std::size_t i = 0; i < resident.size();) {
    cluster = resident[i].get();
    ran = std::max(ran, run_pass());
    if (failure) throw *failure;
    if (!has_ended(*cluster)) {
      ++i;
    } else {
      end_cluster();
      resident.erase(resident.begin() + static_cast<std::ptrdiff_t>(i));
      ran = Ran::something;
    }
    if (random && ran == Ran::something) break;
  }
  leave();
  return ran;
}

void drop_resident() {
  resident.clear();
  failure.reset();
  leave();
  forget_access();
}

void begin_session() {
  random_clusters.seed(settings().schedule.seed);
  forget_all_accesses();  // what comes now comes behind them
  turn = 0;
}

std::uint64_t pass_time(std::uint64_t more) { return ticks += more; }

namespace {
// "warp 1, warps 4 to 7".
std::string names_of(const std::set<unsigned>& warps) {
  std::string text;
  for (auto first = warps.begin(); first != warps.end();) {
    auto last = first, next = std::next(first);
    while (next != warps.end() && *next == *last + 1) last = next++;
    if (!text.empty()) text += ", ";
    text += first == last ? "warp " : "warps " + std::to_string(*first) + " to ";
    text += std::to_string(*last);
    first = next;
  }
  return text;
}
}  // namespace

void report_deadlock() {
  const bool launches = std::any_of(resident.begin(), resident.end(), [](const auto& one) {
    return one->run != resident.front()->run;
  });
  // [what][block]: the warps
  std::map<std::string, std::map<std::string, std::set<unsigned>>> waits;
  for (const auto& one : resident) {
    cluster = one.get();
    for (const auto& each : cluster->blocks) {
      std::string where;
      if (resident.size() > 1 || cluster->ranks() > 1) {
        where = " of block " + std::to_string(each->index[0]);
      }
      if (launches) where += " in " + name_of_launch(cluster->run->number);
      for (const Thread& thread : each->all) {
        if (!thread.done) waits[thread.waiting.describe()][where].insert(thread.number / 32);
      }
    }
  }
  std::string text = "no thread can go on:";
  for (const auto& [what, blocks] : waits) {
    text += "\n  ";
    for (const auto& [where, warps] : blocks) text += names_of(warps) + where + ", ";
    text += "wait" + what;
  }
  cluster = resident.empty() ? nullptr : resident.front().get();
  block = cluster == nullptr ? nullptr : cluster->blocks.front().get();
  fail("deadlock", text, {});
}

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
std::uint64_t clock_ticks() {
  poll();
  return ++ticks;
}

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
    ++changes;
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
  const bool placed = where.line() != 0 || where.code() != nullptr;
  if (placed) report += "\n  at " + line_of(where);
  if (current != nullptr) {
    report += (placed ? ", " : "\n  at ") + std::string("thread ") +
              std::to_string(current->number) + " (warp " + std::to_string(current->number / 32) +
              ")";
  }
  if (block != nullptr) {
    report += "\n  in block " + std::to_string(block->index[0]) + " of " +
              name_of_launch(cluster->run->number);
  }
  report += ", schedule " + to_string(settings().schedule);
  auto found = std::make_unique<Failure>(check, report);
  if (current == nullptr) throw *found;
  failure = std::move(found);
  for (;;) current->fiber->suspend();  // for ever
}

void check_launch(const Grid& grid) {
  const unsigned threads = grid.block[0] * grid.block[1] * grid.block[2];
  if (grid.cluster == 0 || grid.cluster > kMostRanks || grid.grid[0] % grid.cluster != 0) {
    throw Failure("launch", "launch: clusters of " + std::to_string(grid.cluster) +
                                " blocks in a grid of " + std::to_string(grid.grid[0]));
  }
  if (threads == 0 || threads > 1024 || grid.shared_bytes > kMostDynamic) {
    throw Failure("launch", "launch: a block of " + std::to_string(threads) + " threads and " +
                                std::to_string(grid.shared_bytes) + " bytes of shared memory");
  }
}

void allow_next_kernel(const Where& where) {
  if (is_dropped(where) || block->lets_next) return;
  block->lets_next = true;
  ++changes;
  GridRun& run = *cluster->run;
  --run.held_back;
  const Clock& known = current->knowledge.generic;
  known.tell(cluster->number, run.lets->reads);
  if (run.grid.early && known[cluster->kernel_before()] == 0) run.lets->have_waited = false;
  advance_own_clock();
}

void wait_for_kernel_before(const Where& where) {
  if (is_dropped(where)) return;
  block->knows_before = true;
  if (!cluster->run->grid.early) return;
  block_until({.kind = Waiting::Kind::kernel,
               .object = cluster->run,
               .role = "griddepcontrol.wait",
               .where = where});
  GridRun& run = *cluster->run;
  run.told.join(told_before(*run.behind));
  current->knowledge.hear(cluster->number, told_to_kernels(run.told));
  current->knowledge.generic.raise(cluster->kernel_before(), 1);
}

}  // namespace winnow::simulator
