// What happened to each word of the device's memory while streams hold something, and the search
// for accesses to it that nothing orders: of threads of different blocks, kernels and ranks.
//
// An access of a thread comes behind one of another cluster if its own kernel begins behind the end
// of the other's, or words have told it: a release, or a fence and a strong store behind it, that
// an acquire, or a strong load and a fence behind it, has read. Both must have a scope in which the
// other thread is. Each rank is a GPU of its own, as far as scopes go.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "winnow/simulator/engine.h"
#include "winnow/simulator/engine/clock.h"
#include "winnow/simulator/launch.h"

namespace winnow::simulator {

// Of each stream, from 1, the number up to which its operations have ended.
using Horizon = std::vector<std::uint32_t>;
inline bool holds(const Horizon& horizon, Ticket ticket) {
  return ticket.stream < horizon.size() && horizon[ticket.stream] >= ticket.number;
}

// What a word tells to threads of the block, the GPU and the system.
struct Message {
  struct Level {
    std::uint64_t of = 0;  // the block or the GPU
    Told told;
  };
  std::array<Level, 3> levels;  // by scope
};

struct GridRun;
// What words have told threads of the kernels in the horizon, all of which have ended.
Others told_before(const Horizon& horizon);
// What words have told the host, if it has read all in its memory.
Others told_to_host();
// The kernel has ended, and words have told its threads so much.
void note_end(Ticket ticket, const Others& told);
// A number for a cluster that begins.
std::uint32_t number_cluster(const GridRun& run, const unsigned (&first_block)[3], unsigned threads,
                             Actor kernel_before);

// Accesses of the running thread to the device's memory, all of which is allocated. A store of what
// is there already may be in no order with others: see settle_store().
enum class Proxy { generic, asynchronous };
void note_read(const void* address, std::size_t bytes, const char* what, const Where& where,
               Proxy proxy = Proxy::generic);
void note_store(const void* address, std::size_t bytes, const Where& where);
// The store that note_store() has handed to hold_store() has changed nothing: as if it had not
// been.
void forget_held_store();
void note_strong_read(const void* address, std::size_t bytes, Scope scope, const char* what,
                      const Where& where);
void note_strong_write(const void* address, std::size_t bytes, Scope scope, const char* what,
                       const Where& where);
// A volatile access, which is strong and relaxed.
void note_volatile(const void* address, std::size_t bytes, bool writes, const Where& where);
// Of a bulk copy, of which nobody knows until its thread has waited.
void note_copied(const void* address, std::size_t bytes, const char* what, const Where& where);
void settle_copied(const void* address, std::size_t bytes);

// Of a word of the device's memory; null: there is none, and `makes` is false.
Message* global_message(const void* word, bool makes);

void forget_accesses(const void* begin, std::size_t bytes);
void forget_all_accesses();

}  // namespace winnow::simulator
