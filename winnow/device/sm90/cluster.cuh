// Blocks of a cluster: their ranks, their barrier, and each other's shared memory. Addresses of the
// cluster's shared window come from map_shared(). All of this needs sm_90 or newer. Only
// map_shared(), cluster_sync() and its halves, and st_shared_cluster() also compile for older
// GPUs, where each block is a cluster of its own.
#pragma once

#include <cstdint>

#include "winnow/device/sm90/barrier.cuh"

namespace winnow::device {

__device__ __forceinline__ std::uint32_t cluster_rank() {
  std::uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Maps a shared address of the own block to the same place in block `rank` of the cluster.
__device__ __forceinline__ std::uint32_t map_shared(std::uint32_t address, std::uint32_t rank) {
#if __CUDA_ARCH__ >= 900
  std::uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
#else
  (void)rank;
  return address;
#endif
}

// The barrier of all threads of the cluster, by whole warps. Accesses before it, to any shared
// memory of the cluster too, are visible after it. A block must not end while others may still
// reach into its shared memory.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}
__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// One arrival at a barrier of any block of the cluster, with release semantics for the thread's
// earlier accesses.
__device__ __forceinline__ void mbarrier_arrive_cluster(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier)
               : "memory");
}
// The same for a whole warp, after the accesses of all its lanes.
__device__ __forceinline__ void mbarrier_arrive_warp_cluster(std::uint32_t barrier) {
  __syncwarp();
  if ((threadIdx.x & 31) == 0) mbarrier_arrive_cluster(barrier);
}

// mbarrier_wait() at a barrier of the own block at which threads of others arrive.
__device__ __forceinline__ void mbarrier_wait_cluster(std::uint32_t barrier, std::uint32_t parity,
                                                      const char* role, int what) {
  (void)role, (void)what;
  std::uint32_t done;
  do {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (done == 0);
}

// st.shared of 8 bytes at a multiple of 8, into any block of the cluster.
__device__ __forceinline__ void st_shared_cluster(std::uint32_t address, float2 value) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(value.x),
               "f"(value.y)
               : "memory");
#else
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(value.x), "f"(value.y)
               : "memory");
#endif
}

// ld.shared of 8 bytes at a multiple of 8, from any block of the cluster.
__device__ __forceinline__ uint2 ld_shared_cluster(std::uint32_t address) {
  uint2 value;
  asm volatile("ld.shared::cluster.v2.u32 {%0, %1}, [%2];"
               : "=r"(value.x), "=r"(value.y)
               : "r"(address)
               : "memory");
  return value;
}

}  // namespace winnow::device
