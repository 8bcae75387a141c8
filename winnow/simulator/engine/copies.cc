// Asynchronous copies: cp.async, bulk and tensor copies, bulk stores.
#include <cstring>
#include <string>
#include <utility>

#include "winnow/simulator/engine/block.h"
#include "winnow/simulator/engine/device_memory.h"
#include "winnow/simulator/instructions/bulk_copy.h"

namespace winnow::simulator {
namespace {

void check_source(const CopyPiece& piece, const char* what, Proxy proxy, const Where& where) {
  if (piece.bytes > 0) {
    const auto bytes = static_cast<std::size_t>(piece.bytes);
    if (check_global_place(piece.global, bytes, 1, where)) {
      note_read(piece.global, bytes, what, where, proxy);
    }
  }
}

// What a copy writes holds NaN from now on; whoever touches it before it waits is reported.
void begin_write(const CopyPiece& piece, const Access& access) {
  const auto bytes = static_cast<std::size_t>(piece.size);
  block->shadow(piece.shared, bytes, access.what, access.where).write(piece.shared, bytes, access);
  std::memset(block->at(piece.shared), 0xff, bytes);
}

void land(const CopyPiece& piece) {
  std::byte* const to = block->at(piece.shared);
  std::memset(to, 0, static_cast<std::size_t>(piece.size));
  if (piece.bytes > 0) {
    std::memcpy(to + piece.skip, piece.global, static_cast<std::size_t>(piece.bytes));
  }
}

// All copies of the thread that the arrival stands for have landed: their writes belong to the
// barrier's phase from now on.
void arrive_for_copies(Thread& thread, const CopyArrival& arrival) {
  const Barrier& barrier = barrier_at(arrival.barrier, arrival.where);
  const std::uint32_t phase = barrier.phase + 1;
  std::erase_if(thread.landed, [&](const auto& copy) {
    if (copy.first >= arrival.before) return false;
    cluster->operations[copy.second].stamp = Stamp::of(barrier.actor, phase);
    return true;
  });
  thread.copied.generic.raise(barrier.actor, static_cast<std::int32_t>(phase));
  arrive(arrival.barrier, 1, 0, &thread.copied, arrival.where);
}

void end_copy(Thread& thread, std::uint64_t number, std::uint64_t operation) {
  --thread.copies_under_way;
  thread.landed.emplace_back(number, operation);
  for (auto& arrival : thread.arrivals) {
    if (number < arrival.before) --arrival.left;
  }
  while (!thread.arrivals.empty() && thread.arrivals.front().left == 0) {
    const CopyArrival arrival = thread.arrivals.front();
    thread.arrivals.erase(thread.arrivals.begin());
    arrive_for_copies(thread, arrival);
  }
}

}  // namespace

void copy_async(const CopyPiece& call, const Where& where) {
  if (is_dropped(where)) return;
  CopyPiece piece = call;
  piece.shared = own_place(altered(piece.shared, where), "cp.async", where);
  checked(where, [&] { check_cp_async(piece.shared, piece.global, piece.size); });
  check_source(piece, "cp.async", Proxy::generic, where);
  const std::uint64_t operation = record_operation("cp.async", where);
  Access access = writing_behind_products("cp.async", where);
  access.stamp = Stamp::of_operation(operation);
  begin_write(piece, access);
  ++current->copies_under_way;
  if (!current->open_copies) current->open_copies = std::make_shared<BulkGroup>();
  const std::shared_ptr<BulkGroup> group = current->open_copies;
  ++group->writing;
  group->operations.push_back(operation);
  queue_operation(-1, [piece, operation, group, number = current->copies++, thread = current] {
    land(piece);
    --group->writing;
    end_copy(*thread, number, operation);
  });
}

void copies_commit(const Where& where) {
  if (is_dropped(where)) return;
  if (!current->open_copies) current->open_copies = std::make_shared<BulkGroup>();
  current->copy_groups.push_back(std::move(current->open_copies));
  current->open_copies = nullptr;
}

void copies_wait(int pending, const Where& where) {
  if (is_dropped(where)) return;
  pending = altered(pending, where);
  auto& groups = current->copy_groups;
  while (static_cast<int>(groups.size()) > pending) {
    const std::shared_ptr<BulkGroup> group = groups.front();
    block_until({.kind = Waiting::Kind::writes,
                 .object = group.get(),
                 .role = "cp_async_wait",
                 .where = where});
    for (const std::uint64_t operation : group->operations) {
      cluster->operations[operation].stamp = current->stamp();
    }
    groups.erase(groups.begin());
  }
}

void mbarrier_arrive_after_copies(std::uint32_t address, const Where& where) {
  if (is_dropped(where)) return;
  address = own_place(altered(address, where), "an arrival of cp.async", where);
  const Barrier& barrier = barrier_at(address, where);
  if (!current->knowledge.generic.knows(barrier.initialised) || !barrier.fenced) {
    fail("mbarrier", "an arrival of cp.async at a barrier whose initialisation is not known",
         where);
  }
  const CopyArrival arrival{address, current->copies, current->copies_under_way, where};
  if (arrival.left == 0 && current->arrivals.empty()) {
    arrive_for_copies(*current, arrival);
  } else {
    current->arrivals.push_back(arrival);
  }
}

namespace {
// The pieces of a copy to the shared memory of the block, of which the barrier hears, which may be
// another block's.
void load(const char* what, std::vector<CopyPiece> pieces, Block* to, std::uint32_t reported,
          const ClusterPlace& told, const Where& where) {
  {
    const InBlock there(told.block);
    const Barrier& barrier = barrier_at(told.address, where);
    if (!current->knowledge.generic.knows(barrier.initialised) || !barrier.fenced) {
      fail("mbarrier", std::string(what) + " to a barrier whose initialisation is not known",
           where);
    }
  }
  const std::uint64_t operation = record_operation(what, where);
  Access access = block->access(*current, what, where);
  access.stamp = Stamp::of_operation(operation);
  access.async_proxy = true;
  for (const ClusterPlace& place : {ClusterPlace{to, 0}, told}) {
    reach(place, access.stamp, what, where);
  }
  for (CopyPiece& piece : pieces) {
    piece.shared = own_place(altered(piece.shared, where), what, where);
  }
  {
    const InBlock there(to);
    for (const CopyPiece& piece : pieces) {
      check_source(piece, what, Proxy::asynchronous, where);
      begin_write(piece, access);
    }
  }
  queue_operation(-1, [what, to, pieces = std::move(pieces), reported, told, operation, where] {
    if (to->ended || told.block->ended) {
      fail("cluster", std::string(what) + " lands in a block that has ended", where);
    }
    {
      const InBlock there(to);
      for (const CopyPiece& piece : pieces) land(piece);
    }
    const InBlock there(told.block);
    const Barrier& barrier = barrier_at(told.address, where);
    cluster->operations[operation].stamp = Stamp::of(barrier.actor, barrier.phase + 1);
    arrive(told.address, 0, -std::int64_t{reported}, nullptr, where);
  });
}
}  // namespace

void bulk_load(const char* what, const CopyPiece* given, std::size_t count, std::uint32_t reported,
               std::uint32_t address, const Where& where) {
  if (is_dropped(where)) return;
  load(what, {given, given + count}, block, reported, {block, own_place(address, what, where)},
       where);
}

void bulk_load_cluster(const char* what, const CopyPiece* given, std::size_t count, unsigned ranks,
                       std::uint32_t reported, std::uint32_t address, int blocks,
                       const Where& where) {
  if (is_dropped(where)) return;
  const ClusterPlace told = cluster_place(address, what, where);
  if (blocks == 1 ? told.block != block : !told.block->is_in_pair_with(*block)) {
    fail("tensor copy",
         std::string(what) + " with cta_group::" + std::to_string(blocks) +
             " to the barrier of a block that takes no part",
         where);
  }
  for (const auto& each : cluster->blocks) {
    if ((ranks >> each->rank & 1) == 0) continue;
    // Of a multicast each block's own barrier hears; of a pair that of the block with the parity of
    // the named one.
    Block* const hears =
        blocks == 2 ? cluster->blocks[each->rank / 2 * 2 + told.block->rank % 2].get() : each.get();
    load(what, {given, given + count}, each.get(), reported, {hears, told.address}, where);
  }
}

void bulk_store(void* destination, std::uint32_t source, std::uint32_t bytes, const Where& where) {
  if (is_dropped(where)) return;
  source = own_place(altered(source, where), "cp.async.bulk to global memory", where);
  checked(where, [&] { check_bulk_copy(source, destination, bytes); });
  check_copied(destination, bytes, "cp.async.bulk to global memory", where);
  const std::uint64_t operation = record_operation("cp.async.bulk to global memory", where);
  Access access = block->access(*current, "cp.async.bulk to global memory", where);
  access.stamp = Stamp::of_operation(operation);
  access.async_proxy = true;
  block->shadow(source, bytes, access.what, where).read(source, bytes, access);
  if (!current->open_group) current->open_group = std::make_shared<BulkGroup>();
  const std::shared_ptr<BulkGroup> group = current->open_group;
  ++group->reading;
  ++group->writing;
  group->operations.push_back(operation);
  group->stored.emplace_back(destination, bytes);
  queue_operation(-1, [group, destination, source, bytes] {
    const std::byte* const from = block->at(source);
    std::vector<std::byte> data(from, from + bytes);
    --group->reading;
    queue_operation(-1, [group, destination, data = std::move(data)] {
      std::memcpy(destination, data.data(), data.size());
      --group->writing;
    });
  });
}

void bulk_commit(const Where& where) {
  if (is_dropped(where)) return;
  if (!current->open_group) current->open_group = std::make_shared<BulkGroup>();
  current->groups.push_back(std::move(current->open_group));
  current->open_group = nullptr;
}

void bulk_wait(int pending, bool only_reads, const Where& where) {
  if (is_dropped(where)) return;
  pending = altered(pending, where);
  auto& groups = current->groups;
  const auto count = static_cast<int>(groups.size());
  for (int i = 0; i < count - pending; ++i) {
    const std::shared_ptr<BulkGroup> group = groups[static_cast<std::size_t>(i)];
    block_until({.kind = only_reads ? Waiting::Kind::reads : Waiting::Kind::writes,
                 .object = group.get(),
                 .role = only_reads ? "bulk_wait_read" : "bulk_wait",
                 .where = where});
    for (const std::uint64_t operation : group->operations) {
      Stamp& stamp = cluster->operations[operation].stamp;
      if (stamp.none()) stamp = current->stamp();  // an earlier wait has told already
    }
  }
  if (only_reads || count <= pending) return;
  for (int i = 0; i < count - pending; ++i) {
    for (const auto& [to, bytes] : groups[static_cast<std::size_t>(i)]->stored) {
      settle_copied(to, bytes);
    }
  }
  groups.erase(groups.begin(), groups.begin() + count - pending);
}

}  // namespace winnow::simulator
