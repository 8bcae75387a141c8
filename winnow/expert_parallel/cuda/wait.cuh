// How kernels wait for other ranks: until a deadline in nanoseconds of the global timer, or until
// the host says that the awaited rank has ended. A wait that ends in vain is recorded, told to
// the ranks of the node, and returns: no trap, the context survives.
// Device code only.
#pragma once

#include <cstdint>

#include "winnow/device/common/memory.cuh"
#include "winnow/device/common/registers.cuh"
#include "winnow/expert_parallel/cuda/view.cuh"

namespace winnow::expert_parallel {

// Only the first of this rank's threads to come here does anything. If the fault is its own
// (`reporter` is this rank), it tells all ranks of the node; then it writes the host's record.
__device__ inline void report_fault(const LayerView& view, int reporter,
                                    const FaultNotice& notice) {
  if (atomicExch(&view.state->broken, 1u) != 0) return;
  const CudaTopology& topology = view.topology;
  if (reporter == topology.rank) {
    for (int local = 0; local < topology.locals; ++local) {
      std::byte* control = view.control.node[local];
      *reinterpret_cast<FaultNotice*>(control + view.control_layout.notice(reporter)) = notice;
      device::st_release_sys(reinterpret_cast<std::uint64_t*>(control + view.control_layout.fault),
                             std::uint64_t(reporter) + 1);
    }
  }
  view.fault->reporter = reporter;
  view.fault->notice = notice;
  __threadfence_system();
  *const_cast<volatile std::uint32_t*>(&view.fault->state) = 1;
  __threadfence_system();
}

// Whether some rank has told this one of a fault; if so, reports it.
__device__ inline bool fault_signalled(const LayerView& view) {
  const std::byte* control = view.control.local;
  const std::uint64_t signalled = device::ld_acquire_sys(
      reinterpret_cast<const std::uint64_t*>(control + view.control_layout.fault));
  if (signalled == 0) return false;
  const int reporter = int(signalled) - 1;
  report_fault(
      view, reporter,
      *reinterpret_cast<const FaultNotice*>(control + view.control_layout.notice(reporter)));
  return true;
}

// Counts one more arrival. Returns how many there were before.
__device__ __forceinline__ std::uint64_t arrive(std::uint64_t* arrivals) {
  return atomicAdd(reinterpret_cast<unsigned long long*>(arrivals), 1ull);
}

// A wait looks at its word this often (some milliseconds) before it looks again at whether the
// word's writer has ended: what the host says of that is slow to read.
inline constexpr unsigned kLooksBetweenPeers = 4096;

// Whether the host says that the rank that writes `peer`'s words to this rank (writer_for) has
// ended, so that no more will come.
__device__ __forceinline__ bool writer_gone(const LayerView& view, int peer) {
  const std::uint32_t* gone = view.gone + view.topology.writer_for(peer);
  return *const_cast<const volatile std::uint32_t*>(gone) != 0;
}

// Waits until there() is true of a word in this rank's memory. Called by one thread. False: the
// layer is broken and the kernel should end. `peer` is the rank whose word it is (writer_for(peer)
// writes it), `value` what a report says it should be.
template <class There>
__device__ inline bool wait_until(const LayerView& view, const std::uint64_t* word,
                                  const There& there, std::uint64_t value, Phase phase, int peer) {
  if (there(device::ld_acquire_sys(word))) return true;
  const std::uint64_t start = device::globaltimer();
  for (unsigned look = 1;; ++look) {
    const std::uint64_t seen = device::ld_acquire_sys(word);
    if (there(seen)) return true;
    if (look % 64 != 0) continue;
    if (broken(view)) return false;
    if (fault_signalled(view)) return false;
    const std::uint64_t elapsed = device::globaltimer() - start;
    if (elapsed >= view.timeout_ns) {
      report_fault(view, view.topology.rank, {value, seen, elapsed, phase, peer});
      return false;
    }
    if (look % kLooksBetweenPeers == 0 && writer_gone(view, peer)) {
      if (there(device::ld_acquire_sys(word))) return true;  // what it wrote before its end counts
      const int writer = view.topology.writer_for(peer);
      report_fault(view, view.topology.rank, {value, seen, elapsed, phase, writer});
      return false;
    }
  }
}

// Waits until the word is `value` or more.
__device__ inline bool wait_at_least(const LayerView& view, const std::uint64_t* word,
                                     std::uint64_t value, Phase phase, int peer) {
  return wait_until(
      view, word, [value](std::uint64_t seen) { return seen >= value; }, value, phase, peer);
}

// Waits until the words word_of(0), ..., word_of(count - 1) are `value` or more. Called by all
// threads of the block, which get the same answer. A fault names peer_of(i) of the first word that
// is missing, or its writer if the host says that this has ended.
template <class WordOf, class PeerOf>
__device__ bool wait_for_all(const LayerView& view, int count, const WordOf& word_of,
                             std::uint64_t value, Phase phase, const PeerOf& peer_of) {
  const std::uint64_t start = device::globaltimer();
  const auto give_up = [&](unsigned look) {
    if (broken(view)) return true;
    if (fault_signalled(view)) return true;
    const std::uint64_t elapsed = device::globaltimer() - start;
    const bool over = elapsed >= view.timeout_ns;
    if (!over && look % kLooksBetweenPeers != 0) return false;
    for (int i = 0; i < count; ++i) {
      // In this order: what it wrote before its end counts.
      const bool gone = writer_gone(view, peer_of(i));
      if (!over && !gone) continue;
      const std::uint64_t seen = device::ld_acquire_sys(word_of(i));
      if (seen >= value) continue;
      const int named = gone ? view.topology.writer_for(peer_of(i)) : peer_of(i);
      report_fault(view, view.topology.rank, {value, seen, elapsed, phase, named});
      return true;
    }
    return false;
  };
  for (unsigned look = 1;; ++look) {
    bool there = true;
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
      there = there && device::ld_acquire_sys(word_of(i)) >= value;
    }
    if (__syncthreads_and(there)) return true;
    if (look % 64 != 0) continue;
    if (__syncthreads_or(threadIdx.x == 0 && give_up(look))) return false;
  }
}

}  // namespace winnow::expert_parallel
