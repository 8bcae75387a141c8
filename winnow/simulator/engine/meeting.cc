// Meetings of the lanes of a warp, and of threads of a block at named barriers.
#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "winnow/simulator/engine/block.h"

namespace winnow::simulator {
namespace {

std::string hexadecimal(std::uint32_t value) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text = "0x";
  for (int shift = 28; shift >= 0; shift -= 4) text += kDigits[value >> shift & 15];
  return text;
}

}  // namespace

// That of the mask, which is of the same kind, if it has begun. Others that have begun have none of
// its lanes.
WarpMeeting& meeting_of(WarpState& warp, const char* kind, std::uint32_t mask, const Where& where) {
  for (const auto& [other_mask, other] : warp.meetings) {
    if (other.arrived == 0 || (other_mask & mask) == 0) continue;
    if (other_mask == mask && std::strcmp(other.kind, kind) == 0) continue;
    fail("warp",
         std::string(kind) + " with mask " + hexadecimal(mask) + " while other lanes are at " +
             other.kind + " with mask " + hexadecimal(other_mask),
         where);
  }
  const auto [place, is_new] = warp.meetings.try_emplace(mask);
  if (is_new) {
    place->second.arriving.reset(cluster->actors);
    place->second.ended.reset(cluster->actors);
  }
  return place->second;
}

std::array<std::uint64_t, 32> warp_meeting(const char* kind, std::uint32_t mask,
                                           std::uint64_t value, bool orders, const Where& where) {
  const std::uint32_t bit = 1u << (current->number % 32);
  if ((mask & bit) == 0) {
    fail("warp",
         std::string(kind) + " with mask " + hexadecimal(mask) + " in lane " +
             std::to_string(lane()) + ", which is not in it",
         where);
  }
  WarpMeeting& meeting = meeting_of(block->warps[current->number / 32], kind, mask, where);
  meeting.kind = kind;
  const std::uint64_t generation = meeting.generation;
  meeting.values[generation & 1][current->number % 32] = value;
  if (orders) {
    release(meeting.arriving);
    advance_own_clock();
  }
  meeting.arrived |= bit;
  if (meeting.arrived == mask) {
    meeting.arrived = 0;
    ++meeting.generation;
    if (orders) meeting.ended = meeting.arriving;
  } else {
    block_until({.kind = Waiting::Kind::meeting,
                 .object = &meeting,
                 .value = generation,
                 .role = kind,
                 .where = where});
  }
  if (orders) acquire(meeting.ended);
  return meeting.values[generation & 1];
}

namespace {
// Of a barrier of all threads those that have ended are not waited for.
bool end_if_complete(NamedBarrier& barrier) {
  const bool of_all = &barrier == block->named.data() && barrier.threads == block->threads;
  if (barrier.arrived < (of_all ? block->threads - block->threads_ended : barrier.threads)) {
    return false;
  }
  barrier.arrived = 0;
  barrier.result[barrier.generation & 1] = barrier.all;
  barrier.ended = barrier.arriving;
  ++barrier.generation;
  return true;
}
}  // namespace

void leave_named_barriers() {
  ++block->threads_ended;
  NamedBarrier& barrier = block->named.front();
  if (barrier.arrived > 0) end_if_complete(barrier);
}

bool named_barrier(const char* kind, unsigned number, unsigned threads, bool mine,
                   const Where& where) {
  if (is_dropped(where)) return mine;
  threads = altered(threads, where);
  if (number >= kNamedBarriers || (threads % 32 != 0 && threads != block->threads)) {
    fail("named barrier",
         "barrier " + std::to_string(number) + " of " + std::to_string(threads) +
             " threads: numbers go to 15, and threads come in whole warps",
         where);
  }
  NamedBarrier& barrier = block->named[number];
  if (barrier.arrived == 0) {
    barrier.threads = threads;
    barrier.kind = kind;
    barrier.all = true;
  } else if (barrier.threads != threads || std::strcmp(barrier.kind, kind) != 0) {
    fail("named barrier",
         "barrier " + std::to_string(number) + " as " + kind + " of " + std::to_string(threads) +
             " threads, while others are at it as " + barrier.kind + " of " +
             std::to_string(barrier.threads),
         where);
  }
  const std::uint64_t generation = barrier.generation;
  barrier.all = barrier.all && mine;
  release(barrier.arriving);
  advance_own_clock();
  ++barrier.arrived;
  if (!end_if_complete(barrier)) {
    block_until({.kind = Waiting::Kind::named,
                 .object = &barrier,
                 .value = generation,
                 .role = kind,
                 .what = static_cast<int>(number),
                 .where = where});
  }
  acquire(barrier.ended);
  return barrier.result[generation & 1];
}

void set_max_registers(int registers, bool increase, const Where& where) {
  registers = altered(registers, where);
  if (registers < 24 || registers > 256 || registers % 8 != 0) {
    fail("setmaxnreg", std::to_string(registers) + " registers, not a multiple of 8 from 24 to 256",
         where);
  }
  warp_meeting(increase ? "setmaxnreg.inc" : "setmaxnreg.dec", 0xffffffffu, 0, false, where);
  // A kernel with setmaxnreg begins with as many registers a thread as a multiprocessor has for
  // its block. Increases wait until decreases have left enough: the numbers that the warps end
  // with, where they are known, must fit.
  constexpr int kRegisters = 65536, kLeast = 24, kMost = 255;
  const auto threads = static_cast<int>(block->threads);
  const int begun = std::min(kRegisters / threads / 8 * 8, kMost / 8 * 8), pool = begun * threads;
  int& held = block->warps[current->number / 32].registers;
  // Where several blocks share a multiprocessor, warps begin with fewer than `begun`: what a warp
  // asks for first may be more than it has.
  const int most = held == 0 ? begun : held;
  if (increase ? registers < held : registers > most) {
    fail("setmaxnreg",
         std::string(increase ? "inc" : "dec") + " to " + std::to_string(registers) +
             " registers, and the warp has " + (held == 0 ? "at most " : "") + std::to_string(most),
         where);
  }
  held = registers;
  int wanted = 0;
  for (const WarpState& warp : block->warps) {
    wanted += 32 * (warp.registers == 0 ? kLeast : warp.registers);
  }
  if (wanted > pool) {
    fail("setmaxnreg",
         "the warps want " + std::to_string(wanted) + " registers, and the block began with " +
             std::to_string(pool) + ": an increase never ends",
         where);
  }
}

}  // namespace winnow::simulator
