// Copies of boxes of a tensor to the shared memory of the own block that report to a barrier of
// either block of the pair (cta_group::2). Destination and barrier are addresses of the cluster's
// shared window (device/sm90/cluster.cuh), the map is one of device/sm90/tensor_map.h. One thread
// each; what lies outside of the tensor becomes 0. Device code for sm_100a.
#pragma once

#include <cstdint>

#include <cuda.h>

namespace winnow::device {

// The box that begins at column x of row y.
__device__ __forceinline__ void tensor_load_pair(std::uint32_t destination, const CUtensorMap* map,
                                                 std::uint32_t barrier, int x, int y,
                                                 std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".cta_group::2.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "l"(policy)
      : "memory");
}
// The same of a tensor of three dimensions.
__device__ __forceinline__ void tensor_load_pair(std::uint32_t destination, const CUtensorMap* map,
                                                 std::uint32_t barrier, int x, int y, int z,
                                                 std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".cta_group::2.L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "l"(policy)
      : "memory");
}
// The same to the destination's offset in each block of the cluster whose bit is set. Each reports
// to the barrier's offset in that block of its pair in which `barrier` is.
__device__ __forceinline__ void tensor_load_pair_multicast(std::uint32_t destination,
                                                           const CUtensorMap* map,
                                                           std::uint32_t barrier, int x, int y,
                                                           std::uint16_t ranks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster.cta_group::2 [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "h"(ranks)
      : "memory");
}

// Four rows of the tensor, whose map has boxes of one row, from column x on: to four rows that
// follow each other. A row number that the tensor does not have, as -1, gives zeros.
__device__ __forceinline__ void tensor_gather4_pair(std::uint32_t destination,
                                                    const CUtensorMap* map, std::uint32_t barrier,
                                                    int x, int4 rows, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4.mbarrier::complete_tx::bytes"
      ".cta_group::2.L2::cache_hint [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(x), "r"(rows.x), "r"(rows.y), "r"(rows.z), "r"(rows.w),
      "l"(policy)
      : "memory");
}

}  // namespace winnow::device
