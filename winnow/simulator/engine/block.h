// A block that runs: its threads and all that they share.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "winnow/simulator/engine.h"
#include "winnow/simulator/engine/clock.h"
#include "winnow/simulator/engine/fiber.h"
#include "winnow/simulator/engine/shadow.h"
#include "winnow/simulator/launch.h"

namespace winnow::simulator {

struct Barrier {
  std::uint32_t count = 0, pending = 0, phase = 0;
  std::int64_t bytes = 0;
  Actor actor = 0;
  unsigned initialiser = 0;
  Stamp initialised;
  bool fenced = false;
  Knowledge arriving, ended;  // of the phase that runs, of those before
  Where where;
};

struct NamedBarrier {
  unsigned threads = 0, arrived = 0;
  const char* kind = "";
  bool all = true;
  bool result[2] = {};
  std::uint64_t generation = 0;
  Knowledge arriving, ended;
};

struct WarpState {
  std::array<std::uint64_t, 32> values[2];
  std::uint32_t mask = 0, arrived = 0;
  const char* kind = "";
  std::uint64_t generation = 0;
  Knowledge arriving, ended;
  int priority = 0;
  int registers = 0;  // of a thread, as setmaxnreg set them; 0: as when the kernel began
};

// Bulk copies from shared memory that one bulk_commit() closed.
struct BulkGroup {
  int reading = 0, writing = 0;
  std::vector<std::uint64_t> operations;
};
// An arrival that waits for cp.async copies.
struct CopyArrival {
  std::uint32_t barrier;
  std::uint64_t before;  // copies of the thread with a lower number
  int left;
  Where where;
};

struct Accumulator {
  int n;
  std::vector<float> values;  // [64][n]
};
struct OpenAccumulator {
  float* registers;
  int count;
  std::shared_ptr<Accumulator> values;
  std::uint64_t last;  // the product that adds to it last
};
struct KnownRegisters {  // that were accumulators before
  float* registers;
  int count;
  std::uint64_t fenced;  // what tells their values at the last wgmma.fence
};
struct HeldRegisters {  // of A
  const std::uint32_t* registers[4] = {};
  std::uint32_t values[4] = {};
  std::uint64_t product = 0;
  Where where = {};
};
struct Product {
  WgmmaCall call;
  Where where;
  std::vector<std::uint32_t> a_units = {}, b_units = {};
  std::shared_ptr<Accumulator> accumulator = {};
  std::shared_ptr<std::uint32_t[][4]> a_registers = {};
  int threads = 0, lanes[4] = {};
};
struct Warpgroup {
  std::uint64_t first = 0;  // number of pending.front()
  std::deque<Product> pending;
  std::uint64_t done = 0;
};

// What a thread waits for.
struct Waiting {
  enum class Kind { nothing, meeting, named, mbarrier, products, reads, writes, poll };
  Kind kind = Kind::nothing;
  const void* object = nullptr;
  std::uint64_t value = 0;
  const char* role = "";
  int what = 0;
  std::uint32_t address = 0;
  Where where = {};
  bool is_over() const;
  std::string describe() const;
};

struct Thread {
  Fiber* fiber = nullptr;
  unsigned number = 0;
  bool done = false;
  Waiting waiting;
  Knowledge knowledge, copied;                // copied: by its cp.async, as barriers told
  std::map<Actor, std::uint32_t> taken_over;  // of each barrier: the last phase it waited for
  // cp.async
  std::uint64_t copies = 0;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> landed;  // copy, operation: not told yet
  std::vector<CopyArrival> arrivals;
  int copies_under_way = 0;
  // bulk copies
  std::shared_ptr<BulkGroup> open_group;
  std::vector<std::shared_ptr<BulkGroup>> groups;
  // products
  std::uint64_t products = 0;
  std::vector<std::uint64_t> product_groups;
  bool products_fenced = false;
  std::vector<OpenAccumulator> accumulators;
  std::vector<HeldRegisters> held;
  std::vector<KnownRegisters> known;
  std::vector<std::function<void()>> delayed;  // calls that a planted bug holds back
  Stamp stamp() { return Stamp::of(number, static_cast<std::uint32_t>(knowledge.generic[number])); }
};

struct Block {
  Grid grid;
  unsigned index[3] = {};
  unsigned threads = 0;
  const std::byte* parameters = nullptr;
  std::size_t parameter_bytes = 0;
  std::vector<Thread> all;
  std::vector<WarpState> warps;
  std::vector<Warpgroup> warpgroups;
  std::byte* shared = nullptr;  // address kDynamicBase is at shared + kDynamicBase
  std::size_t dynamic_bytes = 0;
  std::byte* fixed = nullptr;  // static shared memory
  std::size_t fixed_used = 0;
  std::map<const void*, std::uint32_t> fixed_places;
  Shadow dynamic_shadow, fixed_shadow;
  std::map<std::uint32_t, Barrier> barriers;
  std::map<const void*, Knowledge> words;
  std::vector<NamedBarrier> named;
  std::vector<OperationRecord> operations;
  std::vector<std::function<void()>> loose;               // operations in any order
  std::vector<std::deque<std::function<void()>>> queues;  // in order, one a warpgroup
  std::size_t queued = 0;
  std::size_t actors = 0;
  Actor next_barrier = 0;
  std::mt19937_64 random;

  Actor group_actor(unsigned warp) const { return threads + warp / 4; }
  Shadow& shadow(std::uint32_t address, std::size_t bytes, const char* what, const Where& where);
  std::byte* at(std::uint32_t address) {
    return address >= kStaticBase ? fixed + (address - kStaticBase) : shared + address;
  }
  Access access(Thread& thread, const char* what, const Where& where) {
    return {thread.stamp(), &thread.knowledge, false, what, where};
  }
};

// The block that runs, and its thread; null outside of kernels. `current` is null also while the
// scheduler completes an operation.
extern Block* block;
extern Thread* current;

// Takes an operation; runs it at once in schedules that are eager.
void queue_operation(int queue, std::function<void()> operation);  // -1: in any order
std::uint64_t record_operation(const char* what, const Where& where);
void block_until(Waiting waiting);
// What the thread knows, others know now: before its stamps go on.
void release(Knowledge& to);
void acquire(const Knowledge& from);
void advance_own_clock();
void run_delayed();
// Holds the call back until the thread has next arrived at a barrier (Plant::Action::delay).
void delay(std::function<void()> call);
// Ends the phase if all has come.
void arrive(std::uint32_t address, std::uint32_t arrivals, std::int64_t bytes,
            const Knowledge* knowledge, const Where& where);
Barrier& barrier_at(std::uint32_t address, const Where& where);
void check_at_exit();
// threadIdx and its kin become those of the thread.
void set_indices(const Block& of, unsigned thread);

inline constexpr std::size_t kStaticBytes = 64 * 1024, kBarriers = 96;
inline constexpr unsigned kNamedBarriers = 16;

}  // namespace winnow::simulator
