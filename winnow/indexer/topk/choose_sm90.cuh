// The choice from stored scores (choose.cuh), sm90: its launches behind the kernel that stores, and
// clusters of blocks.
#pragma once

#include <cstdint>

#include "winnow/device/common/launch.cuh"
#include "winnow/device/common/runtime.h"
#include "winnow/device/sm90/cluster.cuh"
#include "winnow/indexer/topk/choose.cuh"

namespace winnow::indexer::sm90_detail {

using namespace gpu;

inline constexpr int kChooseBlocks = 8;  // of a cluster at most

struct ClusterOfBlocks {
  static constexpr bool kRereads = true, kSpread = true;

  __device__ static void sync() { device::cluster_sync(); }
  __device__ static void arrive() { device::cluster_arrive(); }
  __device__ static void wait() { device::cluster_wait(); }
  // What lies at this block's address in the block of that rank.
  __device__ static uint2 load(std::uint32_t address, int rank) {
    return device::ld_shared_cluster(device::map_shared(address, static_cast<std::uint32_t>(rank)));
  }
};

// Queues the choice of so many queries, with a block of `warps` warps for each, 4, 8, 16 or 32,
// behind the kernel that stores what it reads.
template <class Params>
void launch_choice(const device::Runtime& runtime, const Params& params, std::int64_t queries,
                   int warps, cudaStream_t stream) {
  const auto launch = [&](auto* kernel) {
    runtime.check(device::launch_early(kernel, dim3(static_cast<unsigned>(queries)), 32 * warps, 0,
                                       stream, params),
                  "launch");
  };
  if (warps == 4) {
    launch(choose_kernel<Params, 4, OneBlock>);
  } else if (warps == 8) {
    launch(choose_kernel<Params, 8, OneBlock>);
  } else if (warps == 16) {
    launch(choose_kernel<Params, 16, OneBlock>);
  } else {
    launch(choose_kernel<Params, kChooseMostWarps, OneBlock>);
  }
}

// The same for any number of rows, with a cluster of blocks for each query.
template <class Params>
void launch_spread_choice(const device::Runtime& runtime, Params params, std::int64_t queries,
                          cudaStream_t stream) {
  // Two blocks at least; more while two thirds of the multiprocessors are enough, as clusters fit
  // only within groups of multiprocessors.
  params.blocks = 2;
  while (params.blocks < kChooseBlocks &&
         2 * params.blocks * queries <= runtime.multiprocessors() * 2 / 3) {
    params.blocks *= 2;
  }
  runtime.check(
      device::launch_clusters_early(choose_kernel<Params, kChooseMostWarps, ClusterOfBlocks>,
                                    params.blocks, static_cast<int>(queries * params.blocks),
                                    32 * kChooseMostWarps, 0, stream, params),
      "launch");
}

}  // namespace winnow::indexer::sm90_detail
