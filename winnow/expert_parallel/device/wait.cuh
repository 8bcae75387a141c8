// How kernels wait for other ranks: with a deadline in nanoseconds of the global timer. A wait that
// expires is recorded, told to the ranks of the node, and returns: no trap, the context survives.
// Device code only.
#pragma once

#include <cstdint>

#include "winnow/expert_parallel/device/view.h"

namespace winnow::expert_parallel {

__device__ __forceinline__ std::uint64_t load_acquire_system(const std::uint64_t* word) {
  std::uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
// Everything that this thread wrote before, and what it has seen of others (after a barrier or a
// fence), is visible to whoever reads the word with acquire.
__device__ __forceinline__ void store_release_system(std::uint64_t* word, std::uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
__device__ __forceinline__ std::uint64_t global_nanoseconds() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// The first of this rank's threads to come here writes the record and tells the node.
__device__ inline void report_fault(const LayerView& view, Phase phase, int reporter, int peer,
                                    std::uint64_t waited_for, std::uint64_t seen,
                                    std::uint64_t elapsed_ns) {
  if (atomicExch(&view.state->broken, 1u) != 0) return;
  FaultReport* report = view.fault;
  report->phase = phase;
  report->reporter = reporter;
  report->peer = peer;
  report->waited_for = waited_for;
  report->seen = seen;
  report->elapsed_ns = elapsed_ns;
  __threadfence_system();
  *const_cast<volatile std::uint32_t*>(&report->state) = 1;
  __threadfence_system();
  if (reporter != view.topology.rank) return;  // whoever reported it tells the others
  for (int local = 0; local < view.topology.locals; ++local) {
    store_release_system(
        reinterpret_cast<std::uint64_t*>(view.control.node[local] + view.control_layout.fault),
        std::uint64_t(view.topology.rank) + 1);
  }
}

// Until the word, in this rank's memory, is `value` or more. One thread; false: the layer is broken
// and the kernel should end. `peer` is the rank that has to write the word.
__device__ inline bool wait_at_least(const LayerView& view, const std::uint64_t* word,
                                     std::uint64_t value, Phase phase, int peer) {
  if (load_acquire_system(word) >= value) return true;
  const std::uint64_t start = global_nanoseconds();
  const auto* fault =
      reinterpret_cast<const std::uint64_t*>(view.control.local + view.control_layout.fault);
  for (unsigned look = 1;; ++look) {
    const std::uint64_t seen = load_acquire_system(word);
    if (seen >= value) return true;
    if (look % 64 != 0) continue;
    if (*const_cast<const volatile std::uint32_t*>(&view.state->broken) != 0) return false;
    const std::uint64_t elapsed = global_nanoseconds() - start;
    if (const std::uint64_t told = load_acquire_system(fault); told != 0) {
      report_fault(view, phase, int(told) - 1, peer, value, seen, elapsed);
      return false;
    }
    if (elapsed >= view.timeout_ns) {
      report_fault(view, phase, view.topology.rank, peer, value, seen, elapsed);
      return false;
    }
  }
}

}  // namespace winnow::expert_parallel
