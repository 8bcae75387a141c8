// mbarriers: counts, bytes, phases, and what their waiters come to know.
#include <algorithm>
#include <string>

#include "winnow/simulator/engine/block.h"

namespace winnow::simulator {
namespace {

std::string counts_of(const Barrier& barrier) {
  return "count " + std::to_string(barrier.count) + ", of which " +
         std::to_string(barrier.pending) + " arrivals and " + std::to_string(barrier.bytes) +
         " bytes are missing, phase " + std::to_string(barrier.phase);
}

// "full[3][1]", or "at 1024" where no array of a name holds the address.
std::string name_of(std::uint32_t address) {
  auto found = block->barrier_names.upper_bound(address);
  if (found == block->barrier_names.begin()) return "at " + std::to_string(address);
  --found;
  const BarrierNames& names = found->second;
  const auto [rows, columns] = names.extents;
  const std::size_t number = (address - found->first) / 8,
                    inner = std::max<std::size_t>(columns, 1);
  if (number >= std::max<std::size_t>(rows, 1) * inner) return "at " + std::to_string(address);
  std::string name(names.name);
  const auto index = [&](std::size_t i) { name.append("[").append(std::to_string(i)).append("]"); };
  if (rows > 0) index(number / inner);
  if (columns > 0) index(number % inner);
  return name;
}

bool has_ended(const Barrier& barrier, std::uint32_t parity) {
  return (barrier.phase & 1) != parity;
}

void check_parity(std::uint32_t parity, const Where& where) {
  if (parity > 1) {
    fail("mbarrier", "a wait for parity " + std::to_string(parity) + ", which is 0 or 1", where);
  }
}

void take_over(Barrier& barrier) {
  // Nothing new: most waits are of threads that have waited for the phase already. That a thread
  // knows of the barrier's phase says less: another barrier may have told of the copies alone.
  std::uint32_t& taken = current->taken_over[barrier.actor];
  if (taken >= barrier.phase) return;
  taken = barrier.phase;
  acquire(barrier.ended);
}

}  // namespace

void use_barrier(Barrier& barrier, const Where& where) {
  if (current == nullptr || current->actor == barrier.initialiser) return;
  if (!current->knowledge.generic.knows(barrier.initialised)) {
    fail("mbarrier",
         "the barrier " + barrier.name +
             " is used by a thread that nothing orders behind its initialisation",
         where);
  }
  if (!barrier.fenced) {
    fail("mbarrier",
         "no fence.mbarrier_init has followed the initialisation of the barrier " + barrier.name,
         where);
  }
}

Barrier& barrier_at(std::uint32_t address, const Where& where) {
  const auto found = block->barriers.find(address);
  if (found == block->barriers.end()) {
    fail("mbarrier", "the barrier " + name_of(address) + " was not initialised", where);
  }
  return found->second;
}

void name_barriers(std::uint32_t address, const char* name, std::size_t extent0,
                   std::size_t extent1) {
  block->barrier_names.try_emplace(address, BarrierNames{name, {extent0, extent1}});
}

void mbarrier_init(std::uint32_t address, std::uint32_t count, const Where& where) {
  if (is_dropped(where)) return;
  count = altered(count, where);
  address = own_place(address, "mbarrier.init", where);
  if (address % 8 != 0) {
    fail("mbarrier", "a barrier at " + std::to_string(address) + ", not a multiple of 8", where);
  }
  if (count == 0 || count >= 1u << 20) {
    fail("mbarrier", "a count of " + std::to_string(count) + ", not 1 to 2^20 - 1", where);
  }
  block->shadow(address, 8, "mbarrier.init", where)
      .write(address, 8, block->access(*current, "mbarrier.init", where));
  const auto [place, is_new] = block->barriers.try_emplace(address);
  if (!is_new) {
    fail("mbarrier", "the barrier " + place->second.name + " is initialised a second time", where);
  }
  if (block->next_barrier == block->end_barrier) {
    fail("mbarrier", "more than " + std::to_string(kBarriers) + " barriers in a block", where);
  }
  Barrier& barrier = place->second;
  barrier.count = barrier.pending = count;
  barrier.actor = block->next_barrier++;
  barrier.initialiser = current->actor;
  barrier.initialised = current->stamp();
  barrier.name = name_of(address);
  barrier.where = where;
  barrier.arriving.reset(cluster->actors);
  barrier.ended.reset(cluster->actors);
}

void mbarrier_init_fence(const Where& where) {
  if (is_dropped(where)) return;
  for (auto& [address, barrier] : block->barriers) {
    if (barrier.initialiser == current->actor) barrier.fenced = true;
  }
}

void arrive(std::uint32_t address, std::uint32_t arrivals, std::int64_t bytes,
            const Knowledge* knowledge, const Where& where) {
  ++changes;
  Barrier& barrier = barrier_at(address, where);
  if (barrier.pending < arrivals) {
    fail("mbarrier",
         "more arrivals than the count of the barrier " + barrier.name + ": " + counts_of(barrier),
         where);
  }
  barrier.pending -= arrivals;
  barrier.bytes += bytes;
  if (knowledge != nullptr) barrier.arriving.join(*knowledge);
  if (barrier.pending > 0 || barrier.bytes != 0) return;
  ++barrier.phase;
  barrier.pending = barrier.count;
  barrier.ended.join(barrier.arriving);
  barrier.ended.generic.raise(barrier.actor, static_cast<std::int32_t>(barrier.phase));
}

void mbarrier_arrive(std::uint32_t address, std::uint32_t arrivals, std::uint32_t expected_bytes,
                     const Where& where) {
  if (is_dropped(where)) return;
  if (expected_bytes > 0) {
    expected_bytes = altered(expected_bytes, where);
  } else {
    address = altered(address, where);
  }
  address = own_place(address, "an arrival", where);
  const auto call = [=] {
    use_barrier(barrier_at(address, where), where);
    arrive(address, arrivals, expected_bytes, &current->knowledge, where);
    advance_own_clock();
  };
  if (is_delayed(where)) {
    current->delayed.push_back(call);
    return;
  }
  call();
  run_delayed();
}

bool mbarrier_test(std::uint32_t address, std::uint32_t parity, const Where& where) {
  if (is_dropped(where)) return true;
  parity = altered(parity, where) & 1;
  address = own_place(address, "mbarrier.try_wait", where);
  Barrier& barrier = barrier_at(address, where);
  use_barrier(barrier, where);
  if (!has_ended(barrier, parity)) return false;
  take_over(barrier);
  return true;
}

void mbarrier_wait(std::uint32_t address, std::uint32_t parity, const char* role, int what,
                   const Where& where, bool of_cluster) {
  check_parity(parity, where);
  if (is_dropped(where)) return;
  parity = altered(parity, where) & 1;
  address = own_place(address, "mbarrier.try_wait", where);
  Barrier& barrier = barrier_at(address, where);
  use_barrier(barrier, where);
  current->last_role = role;
  current->last_what = what;
  block_until({.kind = Waiting::Kind::mbarrier,
               .object = &barrier,
               .value = parity,
               .role = role,
               .what = what,
               .address = address,
               .where = where});
  if (barrier.remote && !of_cluster) {
    fail("mbarrier",
         "a wait in the scope of the block at the barrier " + barrier.name +
             ", at which threads of another block arrive",
         where);
  }
  take_over(barrier);
}

}  // namespace winnow::simulator
