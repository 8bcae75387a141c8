// The accesses that kernels make by plain pointers. Kernels are compiled with -fsanitize=thread,
// for which g++ calls these functions before each load and store; ThreadSanitizer's own library,
// which would answer the calls, is not linked. What is in a thread's own stack and in the program's
// own memory is let through, the rest is shared memory or must be an allocation of the device.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "winnow/simulator/engine/block.h"
#include "winnow/simulator/engine/device_memory.h"
#include "winnow/simulator/engine/global_shadow.h"
#include "winnow/simulator/engine/writers.h"

namespace winnow::simulator {
namespace {

bool is_busy = false;  // in access(): what instrumented functions do there is ignored

// The store that hold_store() holds.
struct {
  const void* address = nullptr;  // null: there is none
  std::size_t bytes = 0;
  std::byte before[32];
  std::string text;
  unsigned thread = 0;
  Where where;
  bool is_global = false;
} held;

// The access that is about to be made, if a planted bug alters it: a store is undone or moved
// afterwards, what a load is to read stands at its address until then.
struct {
  std::byte* address = nullptr;  // null: there is none
  std::int64_t moved = 0;        // 0: undone
  bool stores = false;
  std::vector<std::byte> before;
} planted;

void settle_planted() {
  if (planted.address == nullptr) return;
  std::byte* const address = std::exchange(planted.address, nullptr);
  const std::size_t bytes = planted.before.size();
  std::vector<std::byte> stored(address, address + bytes);
  std::memcpy(address, planted.before.data(), bytes);
  if (planted.stores && planted.moved != 0) {
    std::memcpy(address + planted.moved, stored.data(), bytes);
  }
}

void check(const void* address, std::size_t bytes, bool writes, bool strong, const Where& where) {
  if (writes) ++changes;
  if (is_shared(address)) {
    const char* const what = writes ? "a store" : "a load";
    const std::uint32_t at = place_of_pointer(address, where);
    Shadow& shadow = block->shadow(at, bytes, what, where);
    const Access made = block->access(*current, what, where);
    if (!writes) return shadow.read(at, bytes, made);
    const std::string text = shadow.unordered_rewrite(at, bytes, made);
    if (!text.empty()) {
      hold_store(address, bytes, text, where);
      return shadow.overwrite(at, bytes, made);
    }
    return shadow.write(at, bytes, made);
  }
  const bool is_inside = is_allocated(address, bytes);
  if (is_inside) {
    if (writes) note_write(address, bytes, where);
    if (strong) return note_volatile(address, bytes, writes, where);
    return writes ? note_store(address, bytes, where) : note_read(address, bytes, "a load", where);
  }
  if (is_in_program(address)) return;
  if (writes) {
    check_global_write(address, bytes, 1, where);
  } else {
    check_global_read(address, bytes, 1, where);
  }
}

void access(void* address, std::size_t bytes, bool writes, bool strong, const void* code) {
  if (current == nullptr || is_busy || current->fiber->has_on_stack(address)) return;
  is_busy = true;
  settle_store();
  const bool alters = detail::any_planted && detail::is_planted_access(code, writes);
  const std::int64_t moved = alters ? detail::planted_addend() : 0;
  // check() does not return if it fails. A store that will be undone is not checked.
  if (!alters || moved != 0) {
    check(static_cast<std::byte*>(address) + moved, bytes, writes, strong, Where::of_code(code));
  }
  if (alters) {
    planted.address = static_cast<std::byte*>(address);
    planted.moved = moved;
    planted.stores = writes;
    planted.before.assign(planted.address, planted.address + bytes);
    if (!writes) std::memcpy(planted.address, planted.address + moved, bytes);
  }
  is_busy = false;
}

}  // namespace

void hold_store(const void* address, std::size_t bytes, const std::string& text,
                const Where& where) {
  if (bytes > sizeof(held.before)) fail("race", text, where);
  held.address = address;
  held.bytes = bytes;
  std::memcpy(held.before, address, bytes);
  held.text = text;
  held.thread = current->number;
  held.where = where;
  held.is_global = !is_shared(address);
}

void settle_store() {
  settle_planted();
  if (held.address == nullptr) return;
  const void* const address = std::exchange(held.address, nullptr);
  if (std::memcmp(address, held.before, held.bytes) != 0) {
    if (current == nullptr) {  // the thread's turn is over, and fail() cannot name it
      held.text += "\n  by thread " + std::to_string(held.thread) + " (warp " +
                   std::to_string(held.thread / 32) + ")";
    }
    fail("race", held.text, held.where);
  }
  if (held.is_global) forget_held_store();
}

void forget_access() {
  is_busy = false;
  held.address = nullptr;
  planted.address = nullptr;
}

}  // namespace winnow::simulator

extern "C" {

void __tsan_read_range(void* address, std::size_t bytes) {
  winnow::simulator::access(address, bytes, false, false, __builtin_return_address(0));
}
void __tsan_write_range(void* address, std::size_t bytes) {
  winnow::simulator::access(address, bytes, true, false, __builtin_return_address(0));
}
#define WINNOW_ACCESS(name, bytes, writes, strong)                                          \
  void __tsan_##name(void* address) {                                                       \
    winnow::simulator::access(address, bytes, writes, strong, __builtin_return_address(0)); \
  }
#define WINNOW_ACCESSES(bytes)                              \
  WINNOW_ACCESS(read##bytes, bytes, false, false)           \
  WINNOW_ACCESS(write##bytes, bytes, true, false)           \
  WINNOW_ACCESS(unaligned_read##bytes, bytes, false, false) \
  WINNOW_ACCESS(unaligned_write##bytes, bytes, true, false) \
  WINNOW_ACCESS(volatile_read##bytes, bytes, false, true)   \
  WINNOW_ACCESS(volatile_write##bytes, bytes, true, true)
WINNOW_ACCESSES(1)
WINNOW_ACCESSES(2)
WINNOW_ACCESSES(4)
WINNOW_ACCESSES(8)
WINNOW_ACCESSES(16)
#undef WINNOW_ACCESSES
#undef WINNOW_ACCESS

// g++ calls this for the guards of static variables, in host code beside kernels.
unsigned char __tsan_atomic8_load(const volatile unsigned char* address, int) {
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit(void*) {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}

}  // extern "C"
