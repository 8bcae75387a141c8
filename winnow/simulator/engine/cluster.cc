// Blocks of a cluster: their barrier, and how they reach each other's shared memory.
//
// An address of the cluster's shared window has the rank, counted from 1, in bits 24 and up;
// without one it is of the block that uses it.
#include <algorithm>
#include <cstring>
#include <string>

#include "winnow/simulator/engine/block.h"

namespace winnow::simulator {
namespace {

constexpr int kRankShift = 24;

}  // namespace

unsigned cluster_rank() { return block->rank; }

std::uint32_t cluster_address(std::uint32_t address, unsigned rank, const Where& where) {
  rank = altered(rank, where);
  if (rank >= cluster->ranks() || address >> kRankShift != 0) {
    fail("cluster",
         "mapa of " + std::to_string(address) + " to rank " + std::to_string(rank) + " of " +
             std::to_string(cluster->ranks()),
         where);
  }
  return (rank + 1) << kRankShift | address;
}

ClusterPlace cluster_place(std::uint32_t address, const char* what, const Where& where) {
  const unsigned number = address >> kRankShift;
  if (number == 0) return {block, address};
  if (number > cluster->ranks()) {
    fail("cluster", std::string(what) + " names rank " + std::to_string(number - 1), where);
  }
  Block* const there = cluster->blocks[number - 1].get();
  if (there->ended) {
    fail("cluster", std::string(what) + " reaches into a block that has ended", where);
  }
  return {there, address & ((1u << kRankShift) - 1)};
}

void reach(const ClusterPlace& place, Stamp stamp, const char* what, const Where& where) {
  if (place.block == block) return;
  if (stamp.is_operation()) {
    place.block->reached_by_operations.push_back({stamp, what, where});
  } else {
    place.block->reached[stamp.actor()] = {stamp, what, where};
  }
}

void check_reached() {
  const auto check = [](const Reach& one) {
    Stamp stamp = one.stamp;
    if (stamp.is_operation()) stamp = cluster->operations[stamp.operation()].stamp;
    if (!stamp.none() && block->known_at_end.knows(stamp)) return;
    fail("exit",
         "block " + std::to_string(block->rank) + " ends while " + one.what +
             " of another block may still reach into it: no cluster barrier stands between",
         one.where);
  };
  for (const auto& [actor, one] : block->reached) check(one);
  for (const Reach& one : block->reached_by_operations) check(one);
}

void cluster_arrive(const Where& where) {
  if (is_dropped(where)) return;
  warp_meeting("barrier.cluster.arrive", 0xffffffffu, 0, false, where);
  if (current->in_cluster_barrier) {
    fail("cluster", "a thread arrives twice at the barrier of the cluster without a wait", where);
  }
  current->in_cluster_barrier = true;
  current->cluster_generation = cluster->generation;
  release(cluster->arriving);
  advance_own_clock();
  ++cluster->arrived;
  leave_cluster_barrier();
}

void leave_cluster_barrier() {
  unsigned left = 0;
  for (const auto& each : cluster->blocks) {
    for (const Thread& thread : each->all) left += !thread.done;
  }
  if (cluster->arrived < left || cluster->arrived == 0) return;
  cluster->arrived = 0;
  cluster->ended = cluster->arriving;
  ++cluster->generation;
}

void cluster_wait(const Where& where) {
  if (is_dropped(where)) return;
  warp_meeting("barrier.cluster.wait", 0xffffffffu, 0, false, where);
  if (!current->in_cluster_barrier) {
    fail("cluster", "a thread waits at the barrier of the cluster without an arrival", where);
  }
  block_until({.kind = Waiting::Kind::cluster,
               .value = current->cluster_generation,
               .role = "cluster",
               .where = where});
  current->in_cluster_barrier = false;
  acquire(cluster->ended);
}

void mbarrier_arrive_cluster(std::uint32_t address, std::uint32_t arrivals, const Where& where) {
  if (is_dropped(where)) return;
  const ClusterPlace place = cluster_place(altered(address, where), "an arrival", where);
  reach(place, current->stamp(), "an arrival", where);
  const bool remote = place.block != block;
  {
    const InBlock there(place.block);
    if (remote) barrier_at(place.address, where).remote = true;
    use_barrier(barrier_at(place.address, where), where);
    arrive(place.address, arrivals, 0, &current->knowledge, where);
  }
  advance_own_clock();
}

namespace {

// Calls use(address) for memory of any block of the cluster, which stands for the running one.
template <class Use>
void use_shared_cluster(std::uint32_t address, std::size_t bytes, const char* what,
                        const Where& where, const Use& use) {
  const ClusterPlace place = cluster_place(altered(address, where), what, where);
  reach(place, current->stamp(), what, where);
  const InBlock there(place.block);
  if (place.address % bytes != 0) {
    fail("shared memory",
         std::string(what) + " in the cluster at an address that is no multiple of its size",
         where);
  }
  use(place.address);
}

}  // namespace

void write_shared_cluster(std::uint32_t address, const void* from, std::size_t bytes,
                          const Where& where) {
  if (is_dropped(where)) return;
  use_shared_cluster(address, bytes, "a store", where, [&](std::uint32_t at) {
    block->shadow(at, bytes, "a store", where)
        .write(at, bytes, block->access(*current, "a store", where));
    std::memcpy(block->at(at), from, bytes);
  });
}

void read_shared_cluster(std::uint32_t address, void* to, std::size_t bytes, const Where& where) {
  use_shared_cluster(address, bytes, "a load", where, [&](std::uint32_t at) {
    block->shadow(at, bytes, "a load", where)
        .read(at, bytes, block->access(*current, "a load", where));
    std::memcpy(to, block->at(at), bytes);
  });
}

}  // namespace winnow::simulator
