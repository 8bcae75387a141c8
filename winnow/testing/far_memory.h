// Address space of which only the touched pages become memory. Only for tests.
#pragma once

#include <cstddef>
#include <memory>

#include <sys/mman.h>

namespace winnow::testing {

// Zeros; null where there is no such address range.
inline std::shared_ptr<void> far_memory(std::size_t bytes) {
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  return {memory, [bytes](void* mapped) { munmap(mapped, bytes); }};
}

}  // namespace winnow::testing
