// The choice from the keys that topk_paged_sm90.cuh stores, sm90: a block or a cluster of blocks
// for each query.
#pragma once

#include <algorithm>
#include <cstdint>

#include "winnow/indexer/topk/choose_sm90.cuh"
#include "winnow/indexer/topk_paged/choose_paged.cuh"

namespace winnow::indexer::sm90_detail {

// Queues the choice for `queries` queries, each from up to `rows` rows, after the kernel that
// stores their keys.
inline void launch_paged_choice(const device::Runtime& runtime, PagedChooseParams params,
                                std::int64_t queries, std::int64_t rows, cudaStream_t stream) {
  const std::int64_t multiprocessors = runtime.multiprocessors();
  if (rows <= kMostStoredRows) {
    // As many warps as the GPU has room for at a time, where each gets a chunk of rows.
    const std::int64_t room = multiprocessors * kChooseMostWarps / queries;
    int warps = warps_for(rows);
    while (2 * warps <= std::min({room, std::int64_t{kChooseMostWarps}, rows / 128})) warps *= 2;
    return launch_choice(runtime, params, queries, warps, stream);
  }
  // Two blocks at least; more while two thirds of the multiprocessors are enough, as clusters fit
  // only within groups of multiprocessors.
  params.blocks = 2;
  while (params.blocks < kChooseBlocks && 2 * params.blocks * queries <= multiprocessors * 2 / 3) {
    params.blocks *= 2;
  }
  runtime.check(
      device::launch_clusters_early(
          choose_kernel<PagedChooseParams, kChooseMostWarps, ClusterOfBlocks>, params.blocks,
          static_cast<int>(queries * params.blocks), 32 * kChooseMostWarps, 0, stream, params),
      "launch");
}

}  // namespace winnow::indexer::sm90_detail
