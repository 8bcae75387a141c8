// The accesses that kernels make by plain pointers. Kernels are compiled with -fsanitize=thread,
// for which g++ calls these functions before each load and store; ThreadSanitizer's own library,
// which would answer the calls, is not linked. What is in a thread's own stack and in the program's
// own memory is let through, the rest is shared memory or must be an allocation of the device.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "winnow/simulator/engine/block.h"
#include "winnow/simulator/engine/device_memory.h"

namespace winnow::simulator {
namespace {

bool is_busy = false;  // with an access: its report may be made by instrumented functions

// A store that is not ordered behind another thread's. Where it stores what is there already, as
// threads do that set one flag, nobody can tell.
struct {
  const void* address = nullptr;  // null: there is none
  std::size_t bytes = 0;
  std::byte before[16];
  std::string text;
} rewrite;

void check(const void* address, std::size_t bytes, bool writes) {
  const Where nowhere;
  if (writes) ++changes;
  if (is_shared(address)) {
    const char* const what = writes ? "a store" : "a load";
    const std::uint32_t at = window_address(address, nowhere);
    Shadow& shadow = block->shadow(at, bytes, what, nowhere);
    const Access made = block->access(*current, what, nowhere);
    if (!writes) return shadow.read(at, bytes, made);
    if (bytes <= sizeof(rewrite.before)) {
      rewrite.text = shadow.unordered_rewrite(at, bytes, made);
      if (!rewrite.text.empty()) {
        rewrite.text += "\n  by thread " + std::to_string(current->number);
        rewrite.address = address;
        rewrite.bytes = bytes;
        std::memcpy(rewrite.before, address, bytes);
        return shadow.overwrite(at, bytes, made);
      }
    }
    return shadow.write(at, bytes, made);
  }
  if (is_allocated(address, bytes) || is_in_program(address)) return;
  if (writes) {
    check_global_write(address, bytes, 1, nowhere);
  } else {
    check_global_read(address, bytes, 1, nowhere);
  }
}

void access(const void* address, std::size_t bytes, bool writes) {
  if (current == nullptr || is_busy || current->fiber->has_on_stack(address)) return;
  is_busy = true;
  settle_store();
  check(address, bytes, writes);  // does not return if it fails
  is_busy = false;
}

}  // namespace

void settle_store() {
  if (rewrite.address == nullptr) return;
  const void* const address = std::exchange(rewrite.address, nullptr);
  if (std::memcmp(address, rewrite.before, rewrite.bytes) != 0) fail("race", rewrite.text, {});
}

void forget_access() {
  is_busy = false;
  rewrite.address = nullptr;
}

}  // namespace winnow::simulator

extern "C" {

#define WINNOW_ACCESS(bytes)                                                                   \
  void __tsan_read##bytes(void* address) { winnow::simulator::access(address, bytes, false); } \
  void __tsan_write##bytes(void* address) { winnow::simulator::access(address, bytes, true); } \
  void __tsan_unaligned_read##bytes(void* address) {                                           \
    winnow::simulator::access(address, bytes, false);                                          \
  }                                                                                            \
  void __tsan_unaligned_write##bytes(void* address) {                                          \
    winnow::simulator::access(address, bytes, true);                                           \
  }
WINNOW_ACCESS(1)
WINNOW_ACCESS(2)
WINNOW_ACCESS(4)
WINNOW_ACCESS(8)
WINNOW_ACCESS(16)
#undef WINNOW_ACCESS

void __tsan_read_range(void* address, std::size_t bytes) {
  winnow::simulator::access(address, bytes, false);
}
void __tsan_write_range(void* address, std::size_t bytes) {
  winnow::simulator::access(address, bytes, true);
}
// Of the guards of static objects.
unsigned char __tsan_atomic8_load(const volatile unsigned char* address, int) {
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit(void*) {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}

}  // extern "C"
