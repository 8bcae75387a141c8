// Shared memory: where it is, and accesses to it through the generic proxy.
#include <array>
#include <cstring>
#include <string>
#include <utility>

#include "winnow/simulator/engine/block.h"
#include "winnow/simulator/engine/device_memory.h"

namespace winnow::simulator {

std::byte* dynamic_shared(std::size_t alignment) {
  if (kDynamicBase % alignment != 0) {
    fail("shared memory", "dynamic shared memory is aligned to 1024 bytes at most",
         Where::current());
  }
  return block->shared + kDynamicBase;
}

void* block_shared(const void* key, std::size_t bytes, std::size_t alignment) {
  const auto [place, is_new] = block->fixed_places.try_emplace(key, 0);
  if (is_new) {
    const std::size_t at = (block->fixed_used + alignment - 1) / alignment * alignment;
    if (at + bytes > kStaticBytes) {
      fail("shared memory", "more than 64 KiB of static shared memory", Where::current());
    }
    place->second = static_cast<std::uint32_t>(at);
    block->fixed_used = at + bytes;
  }
  return block->fixed + place->second;
}

std::uint32_t window_address(const void* pointer, const Where& where) {
  return block->window() | place_of_pointer(pointer, where);
}

std::uint32_t place_of_pointer(const void* pointer, const Where& where) {
  const auto* const at = static_cast<const std::byte*>(pointer);
  const std::byte* const dynamic = block->shared + kDynamicBase;
  if (at >= dynamic && at <= dynamic + block->dynamic_bytes) {
    return kDynamicBase + static_cast<std::uint32_t>(at - dynamic);
  }
  if (at >= block->fixed && at <= block->fixed + kStaticBytes) {
    return kStaticBase + static_cast<std::uint32_t>(at - block->fixed);
  }
  fail("shared memory", "an address is asked for in the shared window of what is not there", where);
}

Shadow& Block::shadow(std::uint32_t address, std::size_t bytes, const char* what,
                      const Where& where) {
  if (dynamic_shadow.contains(address, bytes)) return dynamic_shadow;
  if (fixed_shadow.contains(address, bytes) && address - kStaticBase + bytes <= fixed_used) {
    return fixed_shadow;
  }
  fail("shared memory",
       std::string(what) + " of " + std::to_string(bytes) + " bytes at " + std::to_string(address) +
           " is outside of the block's shared memory, which begins at " +
           std::to_string(kDynamicBase) + " and has " + std::to_string(dynamic_bytes) + " bytes",
       where);
}

namespace {

void check_aligned(std::uint32_t address, std::size_t bytes, const char* what, const Where& where) {
  if (address % bytes == 0) return;
  fail("shared memory",
       std::string(what) + " of " + std::to_string(bytes) + " bytes at " + std::to_string(address) +
           ", which is not a multiple of them",
       where);
}

}  // namespace

void read_shared(std::uint32_t address, void* to, std::size_t bytes, const Where& where) {
  address = own_place(address, "a load", where);
  check_aligned(address, bytes, "a load", where);
  block->shadow(address, bytes, "a load", where)
      .read(address, bytes, block->access(*current, "a load", where));
  std::memcpy(to, block->at(address), bytes);
}

namespace {
void write(std::uint32_t address, const void* from, std::size_t bytes, const Where& where) {
  ++changes;
  check_aligned(address, bytes, "a store", where);
  block->shadow(address, bytes, "a store", where)
      .write(address, bytes, block->access(*current, "a store", where));
  std::memcpy(block->at(address), from, bytes);
}
}  // namespace

void write_shared(std::uint32_t address, const void* from, std::size_t bytes, const Where& where) {
  if (is_dropped(where)) return;
  address = own_place(altered(address, where), "a store", where);
  if (is_delayed(where)) {
    std::array<std::byte, 16> value{};
    std::memcpy(value.data(), from, bytes);
    delay([=] { write(address, value.data(), bytes, where); });
    return;
  }
  write(address, from, bytes, where);
}

void atomic_begin(const void* address, void* before, std::size_t bytes, const Where& where) {
  if (is_shared(address)) {
    const std::uint32_t at = place_of_pointer(address, where);
    check_aligned(at, bytes, "an atomic operation", where);
    block->shadow(at, bytes, "an atomic operation", where)
        .atomic(at, bytes, block->access(*current, "an atomic operation", where));
  } else {
    check_global_write(address, bytes, bytes, where);
  }
  std::memcpy(before, address, bytes);
}

void read_atomic(const void* address, void* to, std::size_t bytes, const Where& where) {
  const std::uint32_t at = place_of_pointer(address, where);
  check_aligned(at, bytes, "an atomic load", where);
  block->shadow(at, bytes, "an atomic load", where)
      .atomic_read(at, bytes, block->access(*current, "an atomic load", where));
  std::memcpy(to, address, bytes);
}

void atomic_end(void* address, const void* after, std::size_t bytes) {
  ++changes;
  std::memcpy(address, after, bytes);
}

bool is_shared(const void* address) {
  const auto* const at = static_cast<const std::byte*>(address);
  return (at >= block->shared && at < block->shared + kDynamicBase + block->dynamic_bytes) ||
         (at >= block->fixed && at < block->fixed + kStaticBytes);
}

void release(Knowledge& to) { to.join(current->knowledge); }
void acquire(const Knowledge& from) { current->knowledge.join(from); }
void advance_own_clock() { current->knowledge.generic.advance(); }

namespace {
Knowledge& knowledge_of(const void* word) {
  const auto [place, is_new] = block->words.try_emplace(word);
  if (is_new) place->second.reset(cluster->actors);
  return place->second;
}
}  // namespace

void release_to(const void* word) {
  release(knowledge_of(word));
  advance_own_clock();
}
void acquire_from(const void* word) { acquire(knowledge_of(word)); }

void proxy_fence(const Where& where) {
  if (is_dropped(where)) return;
  if (is_delayed(where)) {
    current->delayed.push_back(
        [thread = current] { thread->knowledge.proxy.join(thread->knowledge.generic); });
    return;
  }
  current->knowledge.proxy.join(current->knowledge.generic);
}

void delay(std::function<void()> call) { current->delayed.push_back(std::move(call)); }

void run_delayed() {
  if (current->delayed.empty()) return;
  const auto calls = std::move(current->delayed);
  current->delayed.clear();
  for (const auto& call : calls) call();
}

}  // namespace winnow::simulator
