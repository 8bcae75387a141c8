// Global memory of the simulated device.
#include "winnow/simulator/engine/device_memory.h"

#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <stdexcept>

#include <sys/mman.h>

#include "winnow/simulator/engine/block.h"
#include "winnow/simulator/engine/global_shadow.h"
#include "winnow/simulator/engine/writers.h"

extern "C" {
extern char __executable_start;  // of the linker
extern char _end;
}

namespace winnow::simulator {
namespace {

constexpr std::size_t kPage = 4096;

struct Allocation {
  std::size_t bytes, mapped;
  bool of_host;
};
std::map<const std::byte*, Allocation>& allocations() {
  static std::map<const std::byte*, Allocation> all;
  return all;
}

// The place of the last access, where the next one often is.
struct {
  const std::byte *begin = nullptr, *end = nullptr;
} last;

}  // namespace

void* map_memory(std::size_t bytes, bool of_host) {
  // A page without access on either side; device memory is aligned to 256 bytes, no better.
  const std::size_t padded = (bytes + 255) / 256 * 256;
  const std::size_t mapped = (padded + kPage - 1) / kPage * kPage + 2 * kPage;
  void* const memory =
      mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  auto* const pages = static_cast<std::byte*>(memory);
  mprotect(pages, kPage, PROT_NONE);
  mprotect(pages + mapped - kPage, kPage, PROT_NONE);
  std::byte* const begin = pages + mapped - kPage - padded;  // overruns meet the page behind
  std::memset(begin, 0xff, padded);
  allocations()[begin] = {bytes, mapped, of_host};
  return begin;
}

void unmap_memory(void* memory) {
  const auto found = allocations().find(static_cast<std::byte*>(memory));
  if (found == allocations().end()) {
    throw std::invalid_argument("the simulated device has no allocation at this address");
  }
  const auto page = reinterpret_cast<std::uintptr_t>(memory) / kPage * kPage - kPage;
  munmap(reinterpret_cast<void*>(page), found->second.mapped);
  forget_writers(memory, found->second.bytes);
  forget_accesses(memory, found->second.bytes);
  allocations().erase(found);
  last = {};
}

namespace {

// Without `at + bytes`: a pointer that nobody has set is all ones.
bool lies_in(const std::byte* at, std::size_t bytes, const std::byte* begin, const std::byte* end) {
  return at >= begin && at <= end && bytes <= static_cast<std::size_t>(end - at);
}

}  // namespace

bool is_allocated(const void* address, std::size_t bytes) {
  const auto* const at = static_cast<const std::byte*>(address);
  if (lies_in(at, bytes, last.begin, last.end)) return true;
  auto found = allocations().upper_bound(at);
  if (found == allocations().begin()) return false;
  --found;
  if (!lies_in(at, bytes, found->first, found->first + found->second.bytes)) return false;
  last = {found->first, found->first + found->second.bytes};
  return true;
}

bool is_of_host(const void* address) {
  const auto found = allocations().upper_bound(static_cast<const std::byte*>(address));
  return found != allocations().begin() && std::prev(found)->second.of_host;
}

bool is_in_program(const void* address) {
  const auto* const at = static_cast<const char*>(address);
  return at >= &__executable_start && at < &_end;
}

std::string place_in_memory(const void* address) {
  auto found = allocations().upper_bound(static_cast<const std::byte*>(address));
  if (found == allocations().begin()) return "which is no allocation";
  --found;
  return "byte " + std::to_string(static_cast<const std::byte*>(address) - found->first) +
         " of an allocation of " + std::to_string(found->second.bytes) + " bytes";
}

namespace {

void check_global(const void* address, std::size_t bytes, std::size_t alignment, bool is_inside,
                  const char* what, const Where& where) {
  const auto number = reinterpret_cast<std::uintptr_t>(address);
  if (number % alignment != 0) {
    fail("global memory",
         std::string(what) + " of " + std::to_string(bytes) +
             " bytes at an address that is not a "
             "multiple of " +
             std::to_string(alignment),
         where);
  }
  if (is_inside) return;
  std::string place = "no allocation is near it";
  auto found = allocations().upper_bound(static_cast<const std::byte*>(address));
  if (found != allocations().begin()) {
    --found;
    const auto distance = static_cast<const std::byte*>(address) - found->first;
    if (distance < (1 << 30)) {
      place = "it begins " + std::to_string(distance) + " bytes behind the begin of one of " +
              std::to_string(found->second.bytes) + " bytes";
    }
  }
  fail("global memory",
       std::string(what) + " of " + std::to_string(bytes) +
           " bytes is outside of the device's allocations: " + place,
       where);
}

}  // namespace

bool check_global_place(const void* address, std::size_t bytes, std::size_t alignment,
                        const Where& where) {
  const auto* const at = static_cast<const std::byte*>(address);
  const bool parameter =
      lies_in(at, bytes, block->parameters, block->parameters + block->parameter_bytes);
  const bool is_inside = is_allocated(address, bytes);
  check_global(address, bytes, alignment, is_inside || parameter, "a load", where);
  return is_inside;
}

void check_global_read(const void* address, std::size_t bytes, std::size_t alignment,
                       const Where& where) {
  if (check_global_place(address, bytes, alignment, where)) {
    note_read(address, bytes, "a load", where);
  }
}

void check_global_write(const void* address, std::size_t bytes, std::size_t alignment,
                        const Where& where) {
  ++changes;
  check_global(address, bytes, alignment, is_allocated(address, bytes), "a store", where);
  note_write(address, bytes, where);
  note_store(address, bytes, where);
}

void check_copied(const void* address, std::size_t bytes, const char* what, const Where& where) {
  ++changes;
  check_global(address, bytes, 16, is_allocated(address, bytes), "a store", where);
  note_write(address, bytes, where);
  note_copied(address, bytes, what, where);
}

void check_global_prefetch(const void* address, std::size_t bytes, std::size_t alignment,
                           const Where& where) {
  check_global_place(address, bytes, alignment, where);
}

void check_strong_write(const void* address, std::size_t bytes, Scope scope, const char* what,
                        const Where& where) {
  ++changes;
  check_global(address, bytes, bytes, is_allocated(address, bytes), what, where);
  note_write(address, bytes, where);
  note_strong_write(address, bytes, scope, what, where);
}

}  // namespace winnow::simulator
