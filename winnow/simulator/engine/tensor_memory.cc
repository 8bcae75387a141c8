// Tensor memory: allocation, tcgen05.ld and st, and the fences that order them.
//
// What a warp reads and writes belongs to its lane 0 as an operation: it is done for the warp
// itself with wait::ld or wait::st, and for others with the tcgen05.fence::before_thread_sync
// behind that, once a barrier has told of it and they have come to a fence::after_thread_sync.
#include <algorithm>
#include <bit>
#include <string>

#include "winnow/simulator/engine/block.h"

namespace winnow::simulator {

bool TensorMemory::contains(std::uint32_t column, std::uint32_t columns) const {
  if (column >= kColumns) return false;
  for (std::uint32_t first = 0; first < kColumns; ++first) {
    if (allocated[first] == 0 || column < first) continue;
    if (column + columns <= first + allocated[first]) return true;
  }
  return false;
}

namespace {

void check_group(int blocks, const char* what, const Where& where) {
  if (blocks == 2 && cluster->ranks() % 2 != 0) {
    fail("tcgen05",
         std::string(what) + " with cta_group::2 in a cluster of " +
             (cluster->ranks() == 1 ? "one block" : std::to_string(cluster->ranks()) + " blocks"),
         where);
  }
  if (cluster->tensor_group == 0) cluster->tensor_group = blocks;
  if (cluster->tensor_group != blocks) {
    fail("tcgen05", std::string(what) + ": tcgen05 instructions of one kernel use two cta_groups",
         where);
  }
}

// All lanes are there, with the same value.
void meet(const char* what, std::uint64_t value, const Where& where) {
  const auto values = warp_meeting(what, 0xffffffffu, value, false, where);
  for (const std::uint64_t other : values) {
    if (other != value)
      fail("tcgen05", std::string(what) + ": the lanes of a warp disagree", where);
  }
}

TensorMemory& memory_of(Block& of) {
  if (!of.tensor) {
    of.tensor = std::make_unique<TensorMemory>();
    of.tensor->shadow.reset("tensor memory", 0, 4 * TensorMemory::kColumns * 8,
                            &cluster->operations, cluster->ranks() * cluster->threads);
  }
  return *of.tensor;
}

// The other block of a pair has begun as many allocations, or deallocations.
void wait_for_peer(int Block::* count, const Where& where) {
  const int mine = ++(block->*count);
  const Block& peer = *cluster->blocks[block->rank ^ 1];
  while (peer.*count < mine) {
    if (peer.ended)
      fail("tcgen05", "the other block of the pair has ended without its part", where);
    block_until({.kind = Waiting::Kind::poll, .role = "tcgen05.alloc", .where = where});
  }
}

Actor lane_zero() { return current->actor - current->number % 32; }

Access tensor_access(const char* what, const Where& where) {
  Access access = block->access(*current, what, where);
  access.tensor = &current->tensor;
  access.self = lane_zero();
  return access;
}

// The access of the warp to columns of `groups` groups of 16 lanes from `group` on.
void touch(const char* what, bool writes, std::uint32_t group, std::uint32_t groups,
           std::uint32_t column, std::uint32_t columns, const Where& where) {
  Shadow& shadow = memory_of(*block).shadow;
  Access access = tensor_access(what, where);
  const bool first = lane() == 0;
  std::uint64_t operation = 0;
  if (first) {
    operation = record_operation(what, where);
    access.stamp = Stamp::of_operation(operation);
    (writes ? current->tensor_writes : current->tensor_reads).push_back(operation);
  }
  for (std::uint32_t g = group; g < group + groups; ++g) {
    const std::uint32_t at = tensor_word(g, column);
    if (!first) {
      shadow.check_only(at, 4 * columns, writes, access);
    } else if (writes) {
      shadow.write(at, 4 * columns, access);
    } else {
      shadow.read(at, 4 * columns, access);
    }
  }
}

struct Columns {
  std::uint32_t lane, column, columns, lanes;
};
Columns columns_of(TensorShape shape, const char* what, std::uint32_t address, int count,
                   const Where& where) {
  const bool whole = shape == TensorShape::lanes32x32b;
  const auto registers = static_cast<std::uint32_t>(count);
  const Columns at{address >> 16, address & 0xffff, whole ? registers : registers / 4 * 8,
                   whole ? 32u : 16u};
  const std::uint32_t mine = warp_number() % 4 * 32;
  if (at.lane < mine || at.lane + at.lanes > mine + 32 || at.lane % 16 != 0) {
    fail("tcgen05",
         std::string(what) + " of the lanes from " + std::to_string(at.lane) +
             ", while the warp may reach those from " + std::to_string(mine),
         where);
  }
  if (!std::has_single_bit(whole ? registers : registers / 4)) {
    fail("tcgen05", std::string(what) + " of " + std::to_string(count) + " registers", where);
  }
  check_allocated(*block, what, at.column, at.columns, where);
  return at;
}

}  // namespace

void check_allocated(Block& of, const char* what, std::uint32_t column, std::uint32_t columns,
                     const Where& where) {
  if (memory_of(of).contains(column, columns)) return;
  fail("tcgen05",
       std::string(what) + " of tensor memory at column " + std::to_string(column) + ", " +
           std::to_string(columns) + " columns, which are not in one allocation",
       where);
}

void tensor_allocate(int blocks, std::uint32_t to, std::uint32_t columns, const Where& where) {
  if (is_dropped(where)) return;
  columns = altered(columns, where);
  check_group(blocks, "tcgen05.alloc", where);
  meet("tcgen05.alloc", std::uint64_t{columns} << 32 | to, where);
  TensorMemory& memory = memory_of(*block);
  if (!std::has_single_bit(columns) || columns < TensorMemory::kLeast ||
      columns > TensorMemory::kColumns) {
    fail("tcgen05", "tcgen05.alloc of " + std::to_string(columns) + " columns", where);
  }
  if (memory.relinquished) fail("tcgen05", "tcgen05.alloc behind relinquish_alloc_permit", where);
  if (lane() == 0) {
    if (blocks == 2) wait_for_peer(&Block::tensor_allocations, where);
    std::uint32_t at = 0;
    while (at < TensorMemory::kColumns) {
      std::uint32_t end = at;
      while (end < at + columns && end < TensorMemory::kColumns && !memory.contains(end, 1)) ++end;
      if (end == at + columns) break;
      at = end + 1;
    }
    if (at + columns > TensorMemory::kColumns) {
      fail("tcgen05",
           "tcgen05.alloc waits for ever: no " + std::to_string(columns) + " columns are free",
           where);
    }
    memory.allocated[at] = columns;
    touch("tcgen05.alloc", true, 0, 8, at, columns, where);
    for (const std::uint64_t operation : current->tensor_writes) {
      cluster->operations[operation].waited = true;
      current->tensor_waited.push_back(operation);
    }
    current->tensor_writes.clear();
    write_shared(to, &at, 4, {});  // a planted bug has altered the call already
  }
  meet("tcgen05.alloc", 0, where);
}

void tensor_relinquish(int blocks, const Where& where) {
  if (is_dropped(where)) return;
  check_group(blocks, "tcgen05.relinquish_alloc_permit", where);
  meet("tcgen05.relinquish_alloc_permit", 0, where);
  memory_of(*block).relinquished = true;
}

void tensor_deallocate(int blocks, std::uint32_t address, std::uint32_t columns,
                       const Where& where) {
  if (is_dropped(where)) return;
  columns = altered(columns, where);
  check_group(blocks, "tcgen05.dealloc", where);
  meet("tcgen05.dealloc", std::uint64_t{columns} << 32 | address, where);
  if (lane() == 0) {
    TensorMemory& memory = memory_of(*block);
    if (address >= TensorMemory::kColumns || memory.allocated[address] != columns) {
      fail("tcgen05",
           "tcgen05.dealloc of " + std::to_string(columns) + " columns from " +
               std::to_string(address) + ", which is no allocation",
           where);
    }
    touch("tcgen05.dealloc", true, 0, 8, address, columns, where);
    for (const std::uint64_t operation : current->tensor_writes) {
      cluster->operations[operation].stamp = current->stamp();
    }
    current->tensor_writes.clear();
    memory.allocated[address] = 0;
    if (blocks == 2) wait_for_peer(&Block::tensor_deallocations, where);
  }
  meet("tcgen05.dealloc", 0, where);
}

void tensor_fence_before(const Where& where) {
  if (is_dropped(where)) return;
  for (const std::uint64_t operation : current->tensor_waited) {
    cluster->operations[operation].stamp = current->stamp();
  }
  current->tensor_waited.clear();
}

void tensor_fence_after(const Where& where) {
  if (is_dropped(where)) return;
  current->tensor.join(current->knowledge.generic);
}

void tensor_read(TensorShape shape, std::uint32_t address, std::uint32_t* registers, int count,
                 const Where& where) {
  if (is_dropped(where)) return;
  address = altered(address, where);
  meet("tcgen05.ld", address, where);
  const Columns at = columns_of(shape, "tcgen05.ld", address, count, where);
  touch("tcgen05.ld", false, at.lane / 16, at.lanes / 16, at.column, at.columns, where);
  TensorMemory& memory = *block->tensor;
  for (int i = 0; i < count; ++i) {
    const auto n = static_cast<std::uint32_t>(i);
    std::uint32_t row = at.lane + lane(), column = at.column + n;
    if (shape == TensorShape::lanes16x256b) {
      row = at.lane + lane() / 4 + n / 2 % 2 * 8;
      column = at.column + n / 4 * 8 + lane() % 4 * 2 + n % 2;
    }
    current->tensor_loads.push_back({registers + i, memory.cell(row, column)});
    registers[i] = ~0u;  // NaN, until the wait
  }
}

void tensor_write(std::uint32_t address, const std::uint32_t* registers, int count,
                  const Where& where) {
  if (is_dropped(where)) return;
  address = altered(address, where);
  meet("tcgen05.st", address, where);
  const Columns at = columns_of(TensorShape::lanes32x32b, "tcgen05.st", address, count, where);
  touch("tcgen05.st", true, at.lane / 16, 2, at.column, at.columns, where);
  for (int i = 0; i < count; ++i) {
    block->tensor->cell(at.lane + lane(), at.column + static_cast<std::uint32_t>(i)) = registers[i];
  }
}

void tensor_wait(bool reads, const Where& where) {
  if (is_dropped(where)) return;
  meet(reads ? "tcgen05.wait::ld" : "tcgen05.wait::st", 0, where);
  if (reads) {
    for (const TensorLoad& load : current->tensor_loads) *load.to = load.value;
    current->tensor_loads.clear();
  }
  auto& open = reads ? current->tensor_reads : current->tensor_writes;
  for (const std::uint64_t operation : open) {
    cluster->operations[operation].waited = true;
    current->tensor_waited.push_back(operation);
  }
  open.clear();
}

void check_tensor_memory_at_exit() {
  if (!block->tensor) return;
  for (std::uint32_t column = 0; column < TensorMemory::kColumns; ++column) {
    if (block->tensor->allocated[column] != 0) {
      fail("exit",
           "a block ends without tcgen05.dealloc of the " +
               std::to_string(block->tensor->allocated[column]) + " columns from " +
               std::to_string(column),
           {});
    }
  }
}

}  // namespace winnow::simulator
