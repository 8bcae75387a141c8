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
inline void launch_paged_choice(const device::Runtime& runtime, const PagedChooseParams& params,
                                std::int64_t queries, std::int64_t rows, cudaStream_t stream) {
  const std::int64_t multiprocessors = runtime.multiprocessors();
  if (rows <= kMostStoredRows) {
    // As many warps as the GPU has room for at a time, where each gets a chunk of rows.
    const std::int64_t room = multiprocessors * kChooseMostWarps / queries;
    int warps = warps_for(rows);
    while (2 * warps <= std::min({room, std::int64_t{kChooseMostWarps}, rows / 128})) warps *= 2;
    return launch_choice(runtime, params, queries, warps, stream);
  }
  launch_spread_choice(runtime, params, queries, stream);
}

}  // namespace winnow::indexer::sm90_detail
