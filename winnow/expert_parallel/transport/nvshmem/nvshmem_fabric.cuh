// The fabric of the transport nvshmem: only calls that a network serves too, never a peer's
// pointer. See fabric.cuh for what each has to do. Device code only.
#pragma once

#include <cstdint>

#include <nvshmem.h>
#include <nvshmemx.h>

#include "winnow/expert_parallel/cuda/view.h"

namespace winnow::expert_parallel {

struct NvshmemFabric {
  static constexpr bool kRegisteredSources = true, kNeedsQuiet = true;
  static __device__ void put(const SymmetricView& memory, int rank, std::int64_t offset,
                             const std::byte* from, std::int64_t bytes) {
    nvshmemx_putmem_nbi_block(memory.local + offset, from, static_cast<std::size_t>(bytes), rank);
  }
  static __device__ void signal(const SymmetricView& memory, int rank, std::int64_t offset,
                                std::uint64_t value) {
    __syncthreads();
    if (threadIdx.x != 0) return;
    nvshmem_fence();
    nvshmemx_signal_op(reinterpret_cast<std::uint64_t*>(memory.local + offset), value,
                       NVSHMEM_SIGNAL_SET, rank);
  }
  // A quiet on the GPU completes what this PE has put from the GPU, whichever kernel, block and SM
  // did it: NVSHMEM's API documentation, "Memory Ordering", nvshmem_quiet. In 3.4.5 one thread
  // polls all queue pairs of the PE (nvshmemi_ibgda_quiet), or waits for the proxy to be through
  // with everything that was given to it (nvshmemi_proxy_quiet). Stores to GPUs of this host were
  // complete when their kernel ended.
  static __device__ void quiet() { nvshmem_quiet(); }
};

}  // namespace winnow::expert_parallel
