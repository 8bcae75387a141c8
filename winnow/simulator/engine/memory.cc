// Shared memory: where it is, and accesses to it through the generic proxy; strong accesses to
// either memory, and fences.
#include <array>
#include <cstring>
#include <string>
#include <utility>

#include "winnow/simulator/engine/block.h"
#include "winnow/simulator/engine/device_memory.h"
#include "winnow/simulator/engine/global_shadow.h"
#include "winnow/simulator/engine/grid.h"

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
    std::memset(block->fixed + block->fixed_used, 0xff, at + bytes - block->fixed_used);
    block->fixed_used = at + bytes;
    block->fixed_shadow.extend(block->fixed_used);
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
  if (fixed_shadow.contains(address, bytes)) return fixed_shadow;
  fail("shared memory",
       std::string(what) + " of " + std::to_string(bytes) + " bytes at " + std::to_string(address) +
           " is outside of the block's shared memory, which has " + std::to_string(dynamic_bytes) +
           " dynamic bytes from " + std::to_string(kDynamicBase) +
           " on, and its static objects from " + std::to_string(kStaticBase) + " on",
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

namespace {

// False: the address is not one of shared memory, and nothing is noted.
bool note_in_shared(void (Shadow::*note)(std::uint32_t, std::size_t, const Access&),
                    const void* address, std::size_t bytes, const char* what, const Where& where) {
  if (!is_shared(address)) return false;
  const std::uint32_t at = place_of_pointer(address, where);
  check_aligned(at, bytes, what, where);
  (block->shadow(at, bytes, what, where).*note)(at, bytes, block->access(*current, what, where));
  return true;
}

// Null: there is none, and `makes` is false.
Message* message_of(const void* word, bool makes) {
  if (!is_shared(word)) return global_message(word, makes);
  if (makes) return &block->messages[word];
  const auto found = block->messages.find(word);
  return found == block->messages.end() ? nullptr : &found->second;
}

constexpr std::array kScopes = {Scope::block, Scope::gpu, Scope::system};
std::size_t level_of(Scope scope) { return static_cast<std::size_t>(scope); }
// Which block or GPU it is that the running thread is in.
std::uint64_t party(Scope scope) {
  if (scope == Scope::system) return 1;
  if (scope == Scope::gpu) return 1 + cluster->run->gpu;
  return std::uint64_t{cluster->number} * kMostRanks + block->rank;
}

Fences& fences() {
  if (!current->fences) current->fences = std::make_unique<Fences>();
  return *current->fences;
}

// What a strong write of the running thread passes on; `adds`: to what the word tells already.
void send(const void* word, Order order, Scope scope, bool adds) {
  const bool releases = order == Order::release;
  Message* const message = message_of(word, releases || current->fences);
  if (message == nullptr) return;
  if (!adds) *message = {};
  for (const Scope each : kScopes) {
    if (each > scope) break;
    const Knowledge* knowledge = releases ? &current->knowledge : nullptr;
    if (!releases && current->fences) {
      const auto& fenced = current->fences->knowledge[level_of(each)];
      if (fenced) knowledge = &*fenced;
    }
    if (knowledge == nullptr) continue;
    Message::Level& level = message->levels[level_of(each)];
    if (level.of != party(each)) level = {party(each), {}};
    knowledge->tell(cluster->number, level.told);
  }
  if (releases) advance_own_clock();
}

// What a strong read of the running thread learns: at once, or at its next fence.
void receive(const void* word, Order order, Scope scope) {
  const Message* const message = message_of(word, false);
  if (message == nullptr) return;
  for (const Scope each : kScopes) {
    if (each > scope) break;
    const Message::Level& level = message->levels[level_of(each)];
    if (level.of != party(each)) continue;
    if (order == Order::acquire) {
      current->knowledge.hear(cluster->number, level.told);
    } else {
      fences().seen[level_of(each)].join(level.told);
    }
  }
}

}  // namespace

void read_strong(const void* address, void* to, std::size_t bytes, Order order, Scope scope,
                 const Where& where) {
  constexpr const char* kWhat = "a strong load";
  if (!note_in_shared(&Shadow::atomic_read, address, bytes, kWhat, where) &&
      check_global_place(address, bytes, bytes, where)) {
    note_strong_read(address, bytes, scope, kWhat, where);
  }
  if (!is_weakened(where)) receive(address, order, scope);
  std::memcpy(to, address, bytes);
}

void write_strong(void* address, const void* from, std::size_t bytes, Order order, Scope scope,
                  const Where& where) {
  constexpr const char* kWhat = "a strong store";
  if (!note_in_shared(&Shadow::atomic, address, bytes, kWhat, where)) {
    check_strong_write(address, bytes, scope, kWhat, where);
  }
  if (!is_weakened(where)) {
    send(address, order, scope, false);
  } else if (Message* const before = message_of(address, false)) {
    *before = {};
  }
  atomic_end(address, from, bytes);
}

void atomic_begin(const void* address, void* before, std::size_t bytes, Order order, Scope scope,
                  const Where& where) {
  constexpr const char* kWhat = "an atomic operation";
  const bool is_plain = is_weakened(where);
  if (!note_in_shared(is_plain ? &Shadow::write : &Shadow::atomic, address, bytes, kWhat, where)) {
    if (is_plain) {
      check_global_read(address, bytes, bytes, where);
      check_global_write(address, bytes, bytes, where);
    } else {
      check_strong_write(address, bytes, scope, kWhat, where);
    }
  }
  if (!is_plain) {
    receive(address, Order::relaxed, scope);
    send(address, order, scope, true);
  }
  std::memcpy(before, address, bytes);
}

void atomic_end(void* address, const void* after, std::size_t bytes) {
  ++changes;
  std::memcpy(address, after, bytes);
}

void note_volatile(const void* address, std::size_t bytes, bool writes, const Where& where) {
  if (writes) {
    note_strong_write(address, bytes, Scope::system, "a volatile store", where);
    return send(address, Order::relaxed, Scope::system, false);
  }
  note_strong_read(address, bytes, Scope::system, "a volatile load", where);
  receive(address, Order::relaxed, Scope::system);
}

void fence(Scope scope, const Where& where) {
  if (is_dropped(where)) return;
  Fences& all = fences();
  for (const Scope each : kScopes) {
    if (each <= scope) current->knowledge.hear(cluster->number, all.seen[level_of(each)]);
  }
  for (const Scope each : kScopes) {
    if (each <= scope) all.knowledge[level_of(each)] = current->knowledge;
  }
  advance_own_clock();
}

bool is_shared(const void* address) {
  const auto* const at = static_cast<const std::byte*>(address);
  return (at >= block->shared && at < block->shared + kDynamicBase + block->dynamic_bytes) ||
         (at >= block->fixed && at < block->fixed + kStaticBytes);
}

void release(Knowledge& to) { to.join(current->knowledge); }
void acquire(const Knowledge& from) { current->knowledge.join(from); }
void advance_own_clock() { current->knowledge.generic.advance(); }

void proxy_fence(Space space, const Where& where) {
  if (is_dropped(where)) return;
  const auto call = [space, &knowledge = current->knowledge] {
    (space == Space::shared ? knowledge.proxy_of_shared : knowledge.proxy_of_global)
        .join(knowledge.generic);
  };
  is_delayed(where) ? delay(call) : call();
}

void delay(std::function<void()> call) { current->delayed.push_back(std::move(call)); }

void run_delayed() {
  if (current->delayed.empty()) return;
  const auto calls = std::move(current->delayed);
  current->delayed.clear();
  for (const auto& call : calls) call();
}

}  // namespace winnow::simulator
