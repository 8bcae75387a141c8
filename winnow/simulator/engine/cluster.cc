// Blocks of a cluster: their barrier, and how they reach each other's shared memory.
#include <cstdio>
#include <cstring>
#include <string>

#include "winnow/simulator/engine/block.h"

namespace winnow::simulator {
namespace {

constexpr std::uint32_t kPlaceInBlock = ((1u << kRankShift) - 1) & ~kClusterWindow;

std::string hexadecimal(std::uint32_t value) {
  char text[16];
  std::snprintf(text, sizeof(text), "0x%x", value);
  return text;
}

}  // namespace

unsigned cluster_rank() { return block->rank; }

std::uint32_t cluster_address(std::uint32_t address, unsigned rank, const Where& where) {
  rank = altered(rank, where);
  address = own_place(address, "mapa", where);
  if (rank >= cluster->ranks()) {
    fail("cluster",
         "mapa of " + std::to_string(address) + " to rank " + std::to_string(rank) + " of " +
             std::to_string(cluster->ranks()),
         where);
  }
  return cluster->blocks[rank]->window() | address;
}

std::uint32_t own_place(std::uint32_t address, const char* what, const Where& where) {
  const std::uint32_t in_block = address & kPlaceInBlock;
  if (address - in_block == block->window()) return in_block;
  fail("cluster",
       std::string(what) + " at " + hexadecimal(address) +
           ", whose higher bits are not those of the block, " + hexadecimal(block->window()),
       where);
}

ClusterPlace cluster_place(std::uint32_t address, const char* what, const Where& where) {
  const std::uint32_t in_block = address & kPlaceInBlock;
  for (const auto& each : cluster->blocks) {
    if (address - in_block != each->window()) continue;
    if (each->ended) {
      fail("cluster", std::string(what) + " reaches into a block that has ended", where);
    }
    return {each.get(), in_block};
  }
  fail("cluster",
       std::string(what) + " at " + hexadecimal(address) +
           ", whose higher bits are not those of a block of the cluster",
       where);
}

namespace {

// That something has told the running thread that the other block runs.
void check_begun(const Block& other, const char* what, const Where& where) {
  const std::uint32_t bit = 1u << other.rank;
  if ((current->begun_blocks & bit) != 0) return;
  for (const Thread& thread : other.all) {
    if (current->knowledge.generic[thread.actor] == 0) continue;
    current->begun_blocks |= bit;
    return;
  }
  fail("cluster",
       std::string(what) + " reaches into block " + std::to_string(other.rank) +
           ", of which nothing tells that it has begun: no cluster barrier stands before",
       where);
}

}  // namespace

void reach(const ClusterPlace& place, Stamp stamp, const char* what, const Where& where) {
  if (place.block == block) return;
  check_begun(*place.block, what, where);
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
  const unsigned left = cluster->ranks() * cluster->threads - cluster->ended_threads;
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

// A place in memory of any block of the cluster, for an access of so many bytes.
ClusterPlace cluster_access(std::uint32_t address, std::size_t bytes, const char* what,
                            const Where& where) {
  const ClusterPlace place = cluster_place(altered(address, where), what, where);
  if (place.address % bytes != 0) {
    fail("shared memory",
         std::string(what) + " in the cluster at an address that is no multiple of its size",
         where);
  }
  return place;
}

}  // namespace

void write_shared_cluster(std::uint32_t address, const void* from, std::size_t bytes,
                          const Where& where) {
  const ClusterPlace place = cluster_access(address, bytes, "a store", where);
  if (is_dropped(where, place.block->rank)) return;
  reach(place, current->stamp(), "a store", where);
  const InBlock there(place.block);
  block->shadow(place.address, bytes, "a store", where)
      .write(place.address, bytes, block->access(*current, "a store", where));
  std::memcpy(block->at(place.address), from, bytes);
}

void read_shared_cluster(std::uint32_t address, void* to, std::size_t bytes, const Where& where) {
  const ClusterPlace place = cluster_access(address, bytes, "a load", where);
  if (is_dropped(where, place.block->rank)) {
    std::memset(to, 0, bytes);
    return;
  }
  reach(place, current->stamp(), "a load", where);
  const InBlock there(place.block);
  block->shadow(place.address, bytes, "a load", where)
      .read(place.address, bytes, block->access(*current, "a load", where));
  std::memcpy(to, block->at(place.address), bytes);
}

}  // namespace winnow::simulator
