// A cluster that runs: its blocks, their threads, and all that they share. Without clusters of its
// own a block is a cluster of one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "winnow/simulator/engine.h"
#include "winnow/simulator/engine/clock.h"
#include "winnow/simulator/engine/fiber.h"
#include "winnow/simulator/engine/global_shadow.h"
#include "winnow/simulator/engine/shadow.h"
#include "winnow/simulator/instructions/mma.h"
#include "winnow/simulator/launch.h"

namespace winnow::simulator {

inline constexpr std::size_t kStaticBytes = 64 * 1024, kBarriers = 96;
inline constexpr unsigned kNamedBarriers = 16;

struct Barrier {
  std::uint32_t count = 0, pending = 0, phase = 0;
  std::int64_t bytes = 0;
  Actor actor = 0;
  unsigned initialiser = 0;
  Stamp initialised;
  bool fenced = false;
  bool remote = false;        // threads of other blocks arrive at it
  Knowledge arriving, ended;  // of the phase that runs, of those before
  std::string name;           // "full[3]", or "at 1024" where it has none
  Where where;
};
struct BarrierNames {
  const char* name;
  std::size_t extents[2];
};

struct NamedBarrier {
  unsigned threads = 0, arrived = 0;
  const char* kind = "";
  bool all = true;
  bool result[2] = {};
  std::uint64_t generation = 0;
  Knowledge arriving, ended;
};

// Of the lanes of a mask, one after the other.
struct WarpMeeting {
  std::array<std::uint64_t, 32> values[2];
  std::array<MmaOperands, 32> operands[2];  // of the product of the meeting
  std::uint32_t arrived = 0;
  const char* kind = "";
  std::uint64_t generation = 0;
  Knowledge arriving, ended;
};
struct WarpState {
  std::map<std::uint32_t, WarpMeeting> meetings;  // by mask
  int registers = 0;  // of a thread, as setmaxnreg set them; 0: as when the kernel began
};

// Copies that one commit closed.
struct BulkGroup {
  int reading = 0, writing = 0;
  std::vector<std::uint64_t> operations;
  std::vector<std::pair<const void*, std::size_t>> stored = {};  // in global memory
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
  enum class Kind {
    nothing,
    meeting,
    named,
    mbarrier,
    products,
    reads,
    writes,
    poll,
    cluster,
    kernel
  };
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

// tcgen05.ld of a thread: its registers hold NaN until wait::ld.
struct TensorLoad {
  std::uint32_t* to;
  std::uint32_t value;
};

// What a thread knew at its last fence of each scope, and what its strong loads have read, of which
// it knows behind a fence.
struct Fences {
  std::array<std::optional<Knowledge>, 3> knowledge;
  std::array<Told, 3> seen;
};

struct Thread {
  Fiber* fiber = nullptr;
  unsigned number = 0;  // in its block
  Actor actor = 0;
  bool done = false;
  Waiting waiting;
  const char* last_role = nullptr;  // of its last wait for an mbarrier, and what for
  int last_what = 0;
  Knowledge knowledge, copied;                // copied: by its cp.async, as barriers told
  std::map<Actor, std::uint32_t> taken_over;  // of each barrier: the last phase it waited for
  // cp.async
  std::uint64_t copies = 0;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> landed;  // copy, operation: not told yet
  std::vector<CopyArrival> arrivals;
  int copies_under_way = 0;
  // bulk copies
  std::shared_ptr<BulkGroup> open_group;
  std::vector<std::shared_ptr<BulkGroup>> copy_groups;  // of cp.async
  std::shared_ptr<BulkGroup> open_copies;
  std::vector<std::shared_ptr<BulkGroup>> groups;
  // products
  std::uint64_t products = 0;
  std::vector<std::uint64_t> product_groups;
  bool products_fenced = false;
  std::vector<OpenAccumulator> accumulators;
  std::vector<HeldRegisters> held;
  std::vector<KnownRegisters> known;
  std::vector<std::function<void()>> delayed;  // calls that a planted bug holds back
  std::unique_ptr<Fences> fences;              // once there is something to hold
  // tcgen05
  Clock tensor;  // what of others it knew at its last tcgen05.fence::after_thread_sync
  std::vector<TensorLoad> tensor_loads;
  std::vector<std::uint64_t> tensor_reads, tensor_writes;  // operations without a wait
  std::vector<std::uint64_t> tensor_waited;                // without fence::before_thread_sync
  bool in_cluster_barrier = false;                         // between its arrival and its wait
  std::uint64_t cluster_generation = 0;                    // of that arrival
  std::uint32_t begun_blocks = 0;                          // of whose beginning it knows, by rank
  Stamp stamp() { return Stamp::of(actor, static_cast<std::uint32_t>(knowledge.generic[actor])); }
};

// Tensor memory of a block: 128 lanes of 512 columns. The shadow has a word for 16 lanes of a
// column, at 4 times (column + 512 times lane / 16).
struct TensorMemory {
  static constexpr std::uint32_t kLanes = 128, kColumns = 512, kLeast = 32;
  std::vector<std::uint32_t> cells = std::vector<std::uint32_t>(kLanes * kColumns, ~0u);
  // Columns of the allocation that the column belongs to, at its first column; else 0.
  std::array<std::uint32_t, kColumns> allocated{};
  bool relinquished = false;
  Shadow shadow;
  std::uint32_t& cell(std::uint32_t lane, std::uint32_t column) {
    return cells[lane * kColumns + column];
  }
  bool contains(std::uint32_t column, std::uint32_t columns) const;
};

// The last access of an actor of another block to a block's shared memory.
struct Reach {
  Stamp stamp;
  const char* what;
  Where where;
};

struct Block {
  Grid grid;
  unsigned index[3] = {};
  unsigned rank = 0;  // in the cluster
  unsigned threads = 0, threads_ended = 0;
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
  std::map<std::uint32_t, BarrierNames> barrier_names;  // of arrays, at their addresses
  std::unordered_map<const void*, Message> messages;    // of words of shared memory
  std::vector<NamedBarrier> named;
  Actor first_barrier = 0, end_barrier = 0, next_barrier = 0;
  std::unique_ptr<TensorMemory> tensor;                  // once something is allocated in it
  int tensor_allocations = 0, tensor_deallocations = 0;  // of pairs, begun in this block
  std::uint32_t tensor_products = 0;                     // issued in this block
  std::map<Actor, Reach> reached;  // by others' threads, and by operations of others
  std::vector<Reach> reached_by_operations;
  Clock known_at_end;  // to the threads that have ended
  bool ended = false;
  bool lets_next = false;     // griddepcontrol.launch_dependents
  bool knows_before = false;  // griddepcontrol.wait

  // Of what the products of its warpgroup read for a warp.
  Actor product_actor(unsigned warp) const;
  int group_queue(unsigned warp) const;
  // Of the tcgen05 operations that its threads issue.
  Actor tensor_actor() const;
  int tensor_queue() const;
  // cta_group::2: the two blocks whose ranks differ in the lowest bit alone.
  bool is_in_pair_with(const Block& other) const { return rank / 2 == other.rank / 2; }
  // The highest bits of its addresses.
  std::uint32_t window() const;
  Shadow& shadow(std::uint32_t address, std::size_t bytes, const char* what, const Where& where);
  std::byte* at(std::uint32_t address) {
    return address >= kStaticBase ? fixed + (address - kStaticBase) : shared + address;
  }
  Access access(Thread& thread, const char* what, const Where& where) {
    return {thread.stamp(), &thread.knowledge, false, what, where};
  }
};

struct GridRun;
struct Slot;
struct Cluster {
  GridRun* run = nullptr;
  std::uint32_t number = 0;  // of all since the streams were last empty, from 1
  Slot* slot = nullptr;      // its shared memory and fibers
  std::vector<std::unique_ptr<Block>> blocks;
  unsigned threads = 0;  // of a block
  std::vector<OperationRecord> operations;
  std::vector<std::function<void()>> loose;               // operations in any order
  std::vector<std::deque<std::function<void()>>> queues;  // in order: warpgroups, then tensor cores
  std::size_t queued = 0;
  std::size_t actors = 0;
  int tensor_group = 0;        // cta_group of the kernel's tcgen05 instructions, once known
  unsigned arrived = 0;        // at the cluster barrier
  unsigned ended_threads = 0;  // which it does not wait for
  std::uint64_t generation = 0;
  Knowledge arriving, ended;
  std::mt19937_64 random;
  std::vector<std::size_t> order;  // of the warps' turns
  std::uint64_t turn = 0;

  Cluster() = default;
  ~Cluster();
  Cluster(const Cluster&) = delete;
  Cluster& operator=(const Cluster&) = delete;
  unsigned ranks() const { return static_cast<unsigned>(blocks.size()); }
  unsigned warps() const { return (threads + 31) / 32; }     // of a block
  unsigned groups() const { return (threads + 127) / 128; }  // warpgroups of a block
  // Of a block: threads, products of warps, tcgen05 operations, barriers.
  std::size_t actors_of_block() const { return threads + warps() + 1 + kBarriers; }
  // Behind those of all blocks: the end of the kernel before.
  Actor kernel_before() const { return static_cast<Actor>(actors - 1); }
};

// The cluster and the block that run, and the thread; null outside of kernels. `current` is null
// also while the scheduler completes an operation; `block` is then that of its thread.
extern Cluster* cluster;
extern Block* block;
extern Thread* current;

// Counts what others may see: writes, arrivals, operations. Threads that only look again, or meet
// in a loop that looks again, change nothing.
extern std::uint64_t changes;

inline std::uint32_t Block::window() const {
  return cluster->ranks() == 1 ? 0 : kClusterWindow | rank << kRankShift;
}
inline Actor Block::product_actor(unsigned warp) const {
  return cluster->ranks() * threads + rank * cluster->warps() + warp;
}
inline int Block::group_queue(unsigned warp) const {
  return static_cast<int>(rank * cluster->groups() + warp / 4);
}
inline Actor Block::tensor_actor() const {
  return cluster->ranks() * (threads + cluster->warps()) + rank;
}
inline int Block::tensor_queue() const {
  return static_cast<int>(cluster->ranks() * cluster->groups() + rank);
}

// Another block stands for the one that runs, while no thread can be switched.
class InBlock {
 public:
  explicit InBlock(Block* other) : before_(block) { block = other; }
  ~InBlock() { block = before_; }
  InBlock(const InBlock&) = delete;
  InBlock& operator=(const InBlock&) = delete;

 private:
  Block* before_;
};

// What an address of the cluster's shared window stands for.
struct ClusterPlace {
  Block* block;
  std::uint32_t address;
};
ClusterPlace cluster_place(std::uint32_t address, const char* what, const Where& where);
// What an address of the shared window stands for in the block that runs, whose own it must be; and
// where in its shared memory a pointer leads.
std::uint32_t own_place(std::uint32_t address, const char* what, const Where& where);
std::uint32_t place_of_pointer(const void* pointer, const Where& where);
// Notes that the running thread or operation reaches into the place, if that is another block.
void reach(const ClusterPlace& place, Stamp stamp, const char* what, const Where& where);
// The shadow's address of 16 lanes of a column.
inline std::uint32_t tensor_word(std::uint32_t group, std::uint32_t column) {
  return 4 * (TensorMemory::kColumns * group + column);
}
// That the columns are part of one allocation of the block.
void check_allocated(Block& of, const char* what, std::uint32_t column, std::uint32_t columns,
                     const Where& where);
// A thread of the block that runs has ended.
// The meeting of the lanes of a mask; one of other lanes, or of another kind, is a fault.
WarpMeeting& meeting_of(WarpState& warp, const char* kind, std::uint32_t mask, const Where& where);
void leave_named_barriers();
// Ends the phase of the cluster barrier if all threads that have not ended are there.
void leave_cluster_barrier();

// Takes an operation of the block that runs; runs it at once in schedules that are eager.
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
// That the running thread knows of the barrier's initialisation.
void use_barrier(Barrier& barrier, const Where& where);
// An access of the running thread that writes what products may have read.
Access writing_behind_products(const char* what, const Where& where);
void check_at_exit();
void check_tensor_memory_at_exit();
// That nothing of the block was reached from others without being known to it when it ended.
void check_reached();
// threadIdx and its kin become those of the thread.
void set_indices(const Block& of, unsigned thread);

}  // namespace winnow::simulator
