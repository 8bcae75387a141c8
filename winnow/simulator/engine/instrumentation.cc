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
#include "winnow/simulator/engine/writers.h"

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

void check(const void* address, std::size_t bytes, bool writes, const Where& where) {
  if (writes) ++changes;
  if (is_shared(address)) {
    const char* const what = writes ? "a store" : "a load";
    const std::uint32_t at = place_of_pointer(address, where);
    Shadow& shadow = block->shadow(at, bytes, what, where);
    const Access made = block->access(*current, what, where);
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
  const bool is_inside = is_allocated(address, bytes);
  if (is_inside && writes) note_write(address, bytes, where);
  if (is_inside || is_in_program(address)) return;
  if (writes) {
    check_global_write(address, bytes, 1, where);
  } else {
    check_global_read(address, bytes, 1, where);
  }
}

void access(const void* address, std::size_t bytes, bool writes, const void* code) {
  if (current == nullptr || is_busy || current->fiber->has_on_stack(address)) return;
  is_busy = true;
  settle_store();
  check(address, bytes, writes, Where::of_code(code));  // does not return if it fails
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

#define WINNOW_ACCESS(name, writes)                                                 \
  void __tsan_##name(void* address, std::size_t bytes) {                            \
    winnow::simulator::access(address, bytes, writes, __builtin_return_address(0)); \
  }
WINNOW_ACCESS(read_range, false)
WINNOW_ACCESS(write_range, true)
#undef WINNOW_ACCESS
#define WINNOW_ACCESS(name, bytes, writes)                                          \
  void __tsan_##name(void* address) {                                               \
    winnow::simulator::access(address, bytes, writes, __builtin_return_address(0)); \
  }
#define WINNOW_ACCESSES(bytes)                       \
  WINNOW_ACCESS(read##bytes, bytes, false)           \
  WINNOW_ACCESS(write##bytes, bytes, true)           \
  WINNOW_ACCESS(unaligned_read##bytes, bytes, false) \
  WINNOW_ACCESS(unaligned_write##bytes, bytes, true)
WINNOW_ACCESSES(1)
WINNOW_ACCESSES(2)
WINNOW_ACCESSES(4)
WINNOW_ACCESSES(8)
WINNOW_ACCESSES(16)
#undef WINNOW_ACCESSES
#undef WINNOW_ACCESS

// Of the guards of static variables, in host code beside kernels.
unsigned char __tsan_atomic8_load(const volatile unsigned char* address, int) {
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit(void*) {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}

}  // extern "C"
