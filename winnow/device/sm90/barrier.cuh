// Barriers of sm_90: mbarriers in shared memory, named barriers, and the fences between proxies.
// Shared memory is addressed by 32-bit shared-window addresses (shared_address()).
#pragma once

#include <cstdint>

#include "winnow/device/common/named_barrier.cuh"
#include "winnow/device/common/shared.cuh"

namespace winnow::device {

// --- mbarrier -----------------------------------------------------------------------------------
// A phase ends when `count` arrivals have come; then the next one begins. Waiting for parity p
// returns once the phase of that parity has ended: the first phase has parity 0, and waiting for
// parity 1 on a fresh barrier returns at once (a producer's first wait for an empty slot).

__device__ __forceinline__ void mbarrier_init(std::uint32_t barrier, std::uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Makes initialised barriers visible; a __syncthreads() must follow.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// One arrival, with release semantics for the thread's earlier accesses.
__device__ __forceinline__ void mbarrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// What an arrival of mbarrier_arrive_warp() adds to a barrier's count. compute-sanitizer's
// racecheck orders only the accesses of the very lanes that arrive; in a build for it all of them
// do.
#ifdef WINNOW_RACECHECK
inline constexpr int kWarpArrival = 32;
#else
inline constexpr int kWarpArrival = 1;
#endif

// `count` arrivals for a whole warp, after the accesses of all its lanes.
__device__ __forceinline__ void mbarrier_arrive_warp(std::uint32_t barrier, int count = 1) {
  __syncwarp();
#ifdef WINNOW_RACECHECK
  for (int i = 0; i < count; ++i) mbarrier_arrive(barrier);
#else
  if (static_cast<int>(threadIdx.x & 31) < count) mbarrier_arrive(barrier);
#endif
}

// One arrival, plus `bytes` that bulk copies will report to this phase.
__device__ __forceinline__ void mbarrier_arrive_expect(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// An arrival that the hardware makes once all earlier cp.async of this thread have landed. It is
// one of the `count` arrivals. It says nothing about the thread's ordinary stores.
__device__ __forceinline__ void mbarrier_arrive_cp_async(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Waits in hardware for a limited time; true if the phase has ended.
__device__ __forceinline__ bool mbarrier_try_wait(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// The same without a wait.
__device__ __forceinline__ bool mbarrier_test_wait(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

#ifdef WINNOW_BOUNDED_WAITS
// Debug builds: a wait of more than about a second is written down, one entry a warp, and the
// thread exits, so that the kernel ends (the others' waits run out in turn) and the host can print
// what stood still. No printf in the kernel: a call would serialise wgmma and hide the fault.
struct WaitReport {
  char role[8];
  int what;
  std::uint32_t parity, block, thread;
};
inline constexpr int kWaitReports = 256;
static __device__ WaitReport wait_reports[kWaitReports];
static __device__ unsigned wait_report_count;
#endif

// Waits for the end of the phase of `parity`. `role` (8 characters count) and `what` name the
// waiter and the thing waited for in the reports of builds with WINNOW_BOUNDED_WAITS.
__device__ __forceinline__ void mbarrier_wait(std::uint32_t barrier, std::uint32_t parity,
                                              const char* role, int what) {
#ifdef WINNOW_BOUNDED_WAITS
  const long long start = clock64();
  while (!mbarrier_try_wait(barrier, parity)) {
    if (clock64() - start > 2'000'000'000ll) {
      if ((threadIdx.x & 31) == 0) {
        const unsigned at = atomicAdd(&wait_report_count, 1u);
        if (at < kWaitReports) {
          WaitReport& report = wait_reports[at];
          for (int i = 0; i < 8 && role[i] != 0; ++i) report.role[i] = role[i];
          report.what = what;
          report.parity = parity;
          report.block = blockIdx.x;
          report.thread = threadIdx.x;
        }
        __threadfence();
      }
      asm volatile("exit;");
    }
  }
#else
  (void)role, (void)what;
  while (!mbarrier_try_wait(barrier, parity)) {
  }
#endif
}

// --- fences and registers ------------------------------------------------------------------------

// Orders ordinary shared-memory accesses (st.shared, stmatrix) of this thread, and those it has
// synchronised with, before later reads by wgmma and bulk copies. What cp.async wrote is ordered by
// its mbarrier arrival: a fence for it is allowed, and costs forward several per cent.
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Orders what this thread has written to global memory, and what it has acquired of others' writes,
// before later reads by bulk copies.
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Registers per thread of the calling warpgroup from here on; multiples of 8.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace winnow::device
