// Conformance: mbarriers, named barriers, register counts, and kernels that begin early.
#include <cuda_runtime.h>

#include "winnow/device/common/launch.cuh"
#include "winnow/device/common/runtime.h"
#include "winnow/device/common/shared.cuh"
#include "winnow/device/sm90/barrier.cuh"
#include "winnow/device/sm90/cluster.cuh"
#include "winnow/device/sm90/pipeline.cuh"
#include "winnow/device/sm90/places.cuh"
#include "winnow/simulator/conformance.h"

namespace winnow::conformance {
namespace {

using namespace winnow::device;

constexpr Runtime kRuntime{"conformance", "sm90"};

// One thread watches phases end. out: [12] whether the phase of parity 0, then of parity 1, has
// ended: on a fresh barrier of two arrivals; after one arrival; after both; after the next phase's
// first; after its second; and on a barrier at which a warp has arrived twice.
__global__ void mbarriers_kernel(const std::uint32_t*, std::uint32_t* out) {
  const auto* const barriers = reinterpret_cast<const Barrier*>(dynamic_shared<1024>());
  const std::uint32_t barrier = place_of(barriers[0]).address;
  const std::uint32_t of_warp = place_of(barriers[1]).address;
  const bool first = threadIdx.x == 0;
  if (first) {
    mbarrier_init(barrier, 2);
    mbarrier_init(of_warp, 2 * kWarpArrival);
    fence_mbarrier_init();
  }
  __syncthreads();
  if (first) {
    for (int i = 0; i < 5; ++i) {
      if (i == 2) mbarrier_arrive_expect(barrier, 0);
      if (i != 0 && i != 2) mbarrier_arrive(barrier);
      for (std::uint32_t parity = 0; parity < 2; ++parity) {
        const bool ended =
            i % 2 == 0 ? mbarrier_try_wait(barrier, parity) : mbarrier_test_wait(barrier, parity);
        out[2 * i + parity] = ended;
      }
    }
  }
  mbarrier_arrive_warp(of_warp, 2);
  mbarrier_wait(of_warp, 0, "phase", 0);
  if (first) {
    out[10] = mbarrier_test_wait(of_warp, 0);
    out[11] = mbarrier_test_wait(of_warp, 1);
  }
}

// Warps of a producer and three consumers hand 20 items through a ring of 3 slots; between the
// items the producer arrives at barriers in the other ways there are.
// in: [20]. out: [20][3], and where the last of those barriers lies.
constexpr int kItems = 20, kSlots = 3, kConsumers = 3;
struct RingMemory {
  std::uint32_t items[kSlots][32];
  Barrier full[kSlots], empty[kSlots];
  Barrier others[3];  // arrivals of one thread: a plain one, one with bytes, one behind copies
};
struct Ring : Shared<RingMemory> {
  WINNOW_PLACE(items)
  WINNOW_PLACE(full)
  WINNOW_PLACE(empty)
  WINNOW_PLACE(others)
};
__global__ void __launch_bounds__(256, 2) ring_kernel(const std::uint32_t* in, std::uint32_t* out) {
  const Ring shared{shared_address(dynamic_shared<1024>())};
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kSlots; ++i) {
      shared.full()[i].init(kWarpArrival);
      shared.empty()[i].init(kConsumers * kWarpArrival);
      shared.others()[i].init(1);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  if (warp >= 4) {
    setmaxnreg_dec<56>();
    return;
  }
  setmaxnreg_inc<200>();
  PipelineState<kSlots> slot;
  for (int item = 0; item < kItems; ++item) {
    const auto place = shared.items()[slot.stage][0] + lane;
    if (warp == 0) {
      shared.empty()[slot.stage].wait(slot.parity ^ 1, "produce", slot.stage);
      place.store(in[item] + lane);
      shared.full()[slot.stage].arrive_warp();
      if (lane == 0) {
        shared.others()[0].arrive();
        shared.others()[1].arrive_expect(0);
        shared.others()[2].arrive_cp_async();
      }
      for (int i = 0; i < 3; ++i) shared.others()[i].wait(item & 1, "produce", kSlots + i);
    } else {
      const auto full = shared.full()[slot.stage];
      while (!full.test_wait(slot.parity) && !full.try_wait(slot.parity)) {
      }
      const std::uint32_t value = place.load();
      shared.empty()[slot.stage].arrive_warp();
      const std::uint32_t sum = __reduce_add_sync(0xffffffffu, value);
      if (lane == 0) out[kConsumers * item + warp - 1] = sum + warp;
    }
    slot.advance();
  }
  if (threadIdx.x == 0) out[kConsumers * kItems] = shared.offset(shared.others()[2]);
}

// Two pairs of warps pass a value on by barriers of 64 threads; all agree on a conjunction.
// in: [128]. out: [128][2].
__global__ void named_barriers_kernel(const std::uint32_t* in, std::uint32_t* out) {
  WINNOW_BLOCK_SHARED(words, std::uint32_t[128]);
  const int t = static_cast<int>(threadIdx.x), pair = t / 64;
  words[t] = in[t];
  bar_sync<64>(1 + pair);
  out[2 * t] = words[t ^ 32];
  out[2 * t + 1] = barrier_red_and<64>(3 + pair, in[t] != 0);
}

// Two blocks of a cluster reach into each other. in: [2] of each block, stored before the barrier
// of the cluster; [2] stored after it. out: [2][5]: rank, what the other block has stored, what it
// had stored before the barrier, whether the first phase of the own barrier has ended and no other,
// and what the other block has of the own.
constexpr int kClusterThreads = 128;
__global__ void cluster_kernel(const std::uint32_t* in, std::uint32_t* out) {
  const std::uint32_t smem = shared_address(dynamic_shared<1024>()), rank = cluster_rank();
  const std::uint32_t other = 1 - rank;
  const Place<Barrier> barrier{smem + 64};
  cluster_sync();  // the other block has begun
  if (threadIdx.x == 0) {
    barrier.init(kClusterThreads / 32 + 1);
    fence_mbarrier_init();
    st_shared_cluster(map_shared(smem + 8, other), {static_cast<float>(in[rank]), 0.0f});
  }
  cluster_sync();
  const float before = ld_shared<float>(smem + 8);
  if (threadIdx.x == 0) {
    st_shared_cluster(map_shared(smem, other), {static_cast<float>(in[2 + rank]), 0.0f});
    mbarrier_arrive_cluster(map_shared(barrier.address, other));
  }
  mbarrier_arrive_warp_cluster(map_shared(barrier.address, other));
  mbarrier_wait_cluster(barrier.address, 0, "cluster", 0);
  cluster_sync();  // else a phase could end before a slow thread has looked for the one before
  if (threadIdx.x == 0) barrier.arrive_cluster(other);
  barrier.arrive_warp_cluster(other);
  barrier.wait_cluster(1, "cluster", 1);
  if (threadIdx.x == 0) {
    const uint2 there = ld_shared_cluster(map_shared(smem + 8, other));
    out[5 * rank] = rank;
    out[5 * rank + 1] = static_cast<std::uint32_t>(ld_shared<float>(smem));
    out[5 * rank + 2] = static_cast<std::uint32_t>(before);
    out[5 * rank + 3] = barrier.try_wait(1) && !barrier.try_wait(0) ? 1 : 0;
    out[5 * rank + 4] = static_cast<std::uint32_t>(__uint_as_float(there.x)) + there.y;
  }
  cluster_arrive();
  cluster_wait();
}

// Two kernels: the second one may begin early, and reads what the first one writes.
// in: [32]. out: [32] of the first; [32] of the second.
__global__ void first_kernel(const std::uint32_t* in, std::uint32_t* out) {
  allow_next_kernel();
  out[threadIdx.x] = in[threadIdx.x] * 3;
}
__global__ void second_kernel(std::uint32_t* out) {
  const std::uint32_t* const from = out + 31 - threadIdx.x;
  if (threadIdx.x < 16) {
    wait_for_kernel_before();
  } else {
    wait_for_kernel_before(from);
  }
  out[32 + threadIdx.x] = *from + 1;
}

}  // namespace

void launch_mbarriers(const std::uint32_t* in, std::uint32_t* out) {
  kRuntime.launch(mbarriers_kernel, 1, 32, 64, nullptr, in, out);
}
void launch_ring(const std::uint32_t* in, std::uint32_t* out) {
  kRuntime.launch(ring_kernel, 1, 256, 2048, nullptr, in, out);
}
void launch_named_barriers(const std::uint32_t* in, std::uint32_t* out) {
  kRuntime.launch(named_barriers_kernel, 1, 128, 0, nullptr, in, out);
}
void launch_cluster(const std::uint32_t* in, std::uint32_t* out) {
  kRuntime.check(
      launch_clusters(cluster_kernel, 2, dim3(2), dim3(kClusterThreads), 128, nullptr, in, out),
      "launch");
}
void launch_early_kernel(const std::uint32_t* in, std::uint32_t* out) {
  kRuntime.launch(first_kernel, 1, 32, 0, nullptr, in, out);
  kRuntime.check(launch_early(second_kernel, 1, 32, 0, nullptr, out), "launch");
}

}  // namespace winnow::conformance
