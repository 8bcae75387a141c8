// What the host halves of the wrappers (winnow/simulator/include) call: the engine that runs the
// blocks of a kernel on the CPU, thread by thread, and checks what they do. simulator.md says how
// it works. Everything here belongs to the thread of the kernel that runs at the moment.
//
// `where` is the source line of the wrapper's caller: a wrapper's host half takes it as its last
// argument, `Where where = Where::current()`, and hands it on. Reports name it, and planted bugs
// (plant.h) choose the call by it. A violation of a rule ends the launch: these functions do not
// return then, and the launch throws Failure (launch.h).
//
// Host halves are compiled with the kernels, whose loads and stores the engine sees
// (engine/instrumentation.cc): they hold nothing on the heap.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "winnow/core/dtype.h"
#include "winnow/simulator/instructions/matrix_descriptor.h"
#include "winnow/simulator/instructions/misuse.h"
#include "winnow/simulator/instructions/wgmma.h"
#include "winnow/simulator/plant.h"

namespace winnow::simulator {

// Ends the launch with a report: check is its name ("mbarrier"), text a sentence.
[[noreturn]] void fail(const char* check, const std::string& text, const Where& where);

// Calls function(), and reports what it throws as Misuse.
template <class Function>
auto checked(const Where& where, const Function& function) -> decltype(function());

// ---- The running thread ------------------------------------------------------------------------

unsigned thread_number();  // in its block, whatever the block's shape
unsigned block_threads();
inline unsigned lane() { return thread_number() % 32; }
inline unsigned warp_number() { return thread_number() / 32; }
// Lets the others run, where a kernel looks at something again and again.
void poll();
// Clocks and nanoseconds that pass by; they serve loops that wait for a limited time.
std::uint64_t clock_ticks();

// griddepcontrol.launch_dependents and griddepcontrol.wait.
void allow_next_kernel(const Where& where);
void wait_for_kernel_before(const Where& where);

// ---- Memory ------------------------------------------------------------------------------------
// Addresses of the shared window are those that PTX instructions take: in a block, dynamic shared
// memory begins at kDynamicBase, static shared memory at kStaticBase. In a launch with clusters
// every address, also of a block's own memory, has the block's rank from bit kRankShift on, and
// kClusterWindow, which stands for what PTX masks away in descriptors.

inline constexpr std::uint32_t kDynamicBase = 1024, kStaticBase = 0x100000;
inline constexpr std::uint32_t kClusterWindow = 1u << 19;
inline constexpr int kRankShift = 24;
inline constexpr unsigned kMostRanks = 16;

std::byte* dynamic_shared(std::size_t alignment);
// Static shared memory of the block for one declaration, which `key` stands for.
void* block_shared(const void* key, std::size_t bytes, std::size_t alignment);
std::uint32_t window_address(const void* pointer, const Where& where);

// Accesses through the generic proxy: inside of shared memory, aligned to their size, in order with
// those of other threads.
// A planted bug may drop or delay a store, or send it elsewhere.
void read_shared(std::uint32_t address, void* to, std::size_t bytes, const Where& where);
void write_shared(std::uint32_t address, const void* from, std::size_t bytes, const Where& where);
template <class T>
T load_shared(std::uint32_t address, const Where& where) {
  T value;
  read_shared(address, &value, sizeof(T), where);
  return value;
}

// Global memory: aligned to `alignment`, inside of an allocation of the simulated device or of the
// kernel's parameters. Writes only in allocations.
void check_global_read(const void* address, std::size_t bytes, std::size_t alignment,
                       const Where& where);
void check_global_write(const void* address, std::size_t bytes, std::size_t alignment,
                        const Where& where);

// Only inside of memory, as prefetches must be.
void check_global_prefetch(const void* address, std::size_t bytes, std::size_t alignment,
                           const Where& where);

// Strong accesses by pointer to either memory, by which threads hand data over: what a thread knows
// at a release, or at a fence before its strong write, another one knows that has read the word,
// behind its acquire, or behind a fence. A planted bug may drop writes, add to what is stored,
// weaken a release or an acquire to relaxed, and an atomic operation to a plain load and store.
enum class Scope { block, gpu, system };
enum class Order { relaxed, acquire, release };
void read_strong(const void* address, void* to, std::size_t bytes, Order order, Scope scope,
                 const Where& where);
void write_strong(void* address, const void* from, std::size_t bytes, Order order, Scope scope,
                  const Where& where);
template <class T>
T load_strong(const T* address, Order order, Scope scope, const Where& where) {
  T value;
  read_strong(address, &value, sizeof(T), order, scope, where);
  return altered(value, where);
}
template <class T>
void store_strong(T* address, T value, Order order, Scope scope, const Where& where) {
  if (is_dropped(where)) return;
  value = altered(value, where);
  write_strong(address, &value, sizeof(T), order, scope, where);
}
// An atomic operation: between the two calls nothing else runs.
void atomic_begin(const void* address, void* before, std::size_t bytes, Order order, Scope scope,
                  const Where& where);
void atomic_end(void* address, const void* after, std::size_t bytes);
// fence.acq_rel, which __threadfence() is.
void fence(Scope scope, const Where& where);

// ---- Meetings ----------------------------------------------------------------------------------

// The values of the lanes named by `mask`, which all give the same mask and kind. `orders`: what
// they did before is ordered before what they do after.
std::array<std::uint64_t, 32> warp_meeting(const char* kind, std::uint32_t mask,
                                           std::uint64_t value, bool orders, const Where& where);
// Named barrier `number` (0: __syncthreads()) of `threads` threads, of `kind` "sync" or "red.and";
// returns the conjunction of `mine`.
bool named_barrier(const char* kind, unsigned number, unsigned threads, bool mine,
                   const Where& where);

// ---- mbarriers ---------------------------------------------------------------------------------

// How reports name the barriers of an array that begins at the address, before these are
// initialised: "full[3][1]". An extent is 0 where the array has no such dimension.
void name_barriers(std::uint32_t barriers, const char* name, std::size_t extent0,
                   std::size_t extent1);
void mbarrier_init(std::uint32_t barrier, std::uint32_t count, const Where& where);
void mbarrier_init_fence(const Where& where);  // fence.mbarrier_init
void mbarrier_arrive(std::uint32_t barrier, std::uint32_t arrivals, std::uint32_t expected_bytes,
                     const Where& where);
void mbarrier_arrive_after_copies(std::uint32_t barrier, const Where& where);  // of cp.async
// Whether the phase has ended; if so, what was done before its arrivals is known to the caller.
bool mbarrier_test(std::uint32_t barrier, std::uint32_t parity, const Where& where);
// Returns when it has. role and what name the waiter and what it waits for.
// `of_cluster`: with the scope of the cluster, as threads of other blocks that arrive need it.
void mbarrier_wait(std::uint32_t barrier, std::uint32_t parity, const char* role, int what,
                   const Where& where, bool of_cluster = false);

// ---- Clusters ----------------------------------------------------------------------------------
// The addresses are of any block of the cluster; elsewhere they must be of the block itself.

unsigned cluster_rank();
std::uint32_t cluster_address(std::uint32_t address, unsigned rank, const Where& where);  // mapa
void cluster_arrive(const Where& where);
void cluster_wait(const Where& where);
void mbarrier_arrive_cluster(std::uint32_t barrier, std::uint32_t arrivals, const Where& where);
void write_shared_cluster(std::uint32_t address, const void* from, std::size_t bytes,
                          const Where& where);
void read_shared_cluster(std::uint32_t address, void* to, std::size_t bytes, const Where& where);

// ---- Tensor memory -----------------------------------------------------------------------------
// `blocks` is the cta_group of an instruction: 1, or 2 for a pair. Instructions of a whole warp but
// for products, copies and commits, which one thread issues. What no tcgen05.fence orders behind
// what another thread did is a race.

void tensor_allocate(int blocks, std::uint32_t to, std::uint32_t columns, const Where& where);
void tensor_relinquish(int blocks, const Where& where);
void tensor_deallocate(int blocks, std::uint32_t address, std::uint32_t columns,
                       const Where& where);
void tensor_fence_before(const Where& where);
void tensor_fence_after(const Where& where);
// The thread's registers of tcgen05.ld and st: in shape 32x32b its lane's columns from the address
// on; in shape 16x256b (only ld) two rows of 16 lanes, as accumulators of mma.m16n8 hold them.
enum class TensorShape { lanes32x32b, lanes16x256b };
void tensor_read(TensorShape shape, std::uint32_t address, std::uint32_t* registers, int count,
                 const Where& where);
void tensor_write(std::uint32_t address, const std::uint32_t* registers, int count,
                  const Where& where);
void tensor_wait(bool reads, const Where& where);  // wait::ld or wait::st

void tensor_multiply(int blocks, std::uint32_t d, std::uint64_t a, std::uint64_t b,
                     std::uint32_t instruction, bool accumulate, const Where& where);
void tensor_copy_128x256b(int blocks, std::uint32_t to, std::uint64_t from, const Where& where);
// An arrival at the barrier once all that the thread has issued is done; with a mask at the
// barriers of that offset in the blocks of those ranks.
void tensor_commit(int blocks, std::uint32_t barrier, unsigned ranks, const Where& where);

// ---- Matrix fragments --------------------------------------------------------------------------

// stmatrix and ldmatrix (`transposed`: .trans) of four matrices, by a whole warp: the lane's
// address and its registers.
void stmatrix_x4(std::uint32_t address, const std::uint32_t (&registers)[4], const Where& where);
void ldmatrix_x4(std::uint32_t address, std::uint32_t (&registers)[4], bool transposed,
                 const Where& where);
// movmatrix.trans of a whole warp: the lane's register.
std::uint32_t movmatrix_trans(std::uint32_t of_row, const Where& where);
// mma.sync of a whole warp: the lane's registers. `type` is f16 or bf16.
void mma_m16n8k16(DType type, float (&d)[4], const std::uint32_t (&a)[4],
                  std::array<std::uint32_t, 2> b, const Where& where);

// ---- Fences ------------------------------------------------------------------------------------

enum class Space { shared, global };
void proxy_fence(Space space, const Where& where);  // fence.proxy.async.shared::cta, .global

// ---- Asynchronous copies -----------------------------------------------------------------------
// Shared memory that a copy writes is poisoned until the copy lands, and read by a copy when that
// runs, not when it is issued.

// A piece of a copy to shared memory: its bytes are zero but for `bytes` from `skip` on, from
// `global`, which may be null where bytes is 0.
struct CopyPiece {
  std::uint32_t shared;
  int size, skip, bytes;
  const void* global;
};
// cp.async: lands whenever it likes; mbarrier_arrive_after_copies() tells of it, or a wait for the
// group that it is in.
void copy_async(const CopyPiece& piece, const Where& where);
void copies_commit(const Where& where);
void copies_wait(int pending, const Where& where);
// Bulk and tensor copies: report `reported` bytes to the barrier when all pieces have landed.
void bulk_load(const char* what, const CopyPiece* pieces, std::size_t count, std::uint32_t reported,
               std::uint32_t barrier, const Where& where);
// The same to the blocks of the given ranks, at the same offset in each; with `blocks` (cta_group)
// 2 the barrier may be in the other block of the pair.
void bulk_load_cluster(const char* what, const CopyPiece* pieces, std::size_t count, unsigned ranks,
                       std::uint32_t reported, std::uint32_t barrier, int blocks,
                       const Where& where);
// cp.async.bulk.global.shared, its groups and the two waits for them.
void bulk_store(void* destination, std::uint32_t source, std::uint32_t bytes, const Where& where);
void bulk_commit(const Where& where);
void bulk_wait(int pending, bool only_reads, const Where& where);

// ---- Warpgroup products ------------------------------------------------------------------------
// All 128 threads of a warpgroup issue the same products in the same order. Accumulators hold NaN
// from the issue to the wait, and A registers must keep their values.

struct WgmmaCall {
  Wgmma wgmma;
  std::uint64_t a = 0;                       // descriptor, unless A comes from registers
  const std::uint32_t* a_registers[4] = {};  // of this thread; null: A is in shared memory
  std::uint64_t b = 0;
};
void wgmma_issue(const WgmmaCall& call, float* accumulators, int count, const Where& where);
void wgmma_fence(const Where& where);
void wgmma_commit(const Where& where);
void wgmma_wait(int pending, const Where& where);

// ---- Registers ---------------------------------------------------------------------------------

// setmaxnreg: all warps of a warpgroup, with the same count.
void set_max_registers(int registers, bool increase, const Where& where);

// ------------------------------------------------------------------------------------------------

template <class Function>
auto checked(const Where& where, const Function& function) -> decltype(function()) {
  std::string check, text;
  try {
    return function();
  } catch (const Misuse& misuse) {
    check = misuse.check();
    text = misuse.what();
  }
  fail(check.c_str(), text.substr(check.size() + 2), where);
}

}  // namespace winnow::simulator
