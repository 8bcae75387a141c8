// How the kernel for every GPU shares out the tiles of all queries: those of each query are cut
// into segments, and a block has one, for 64 heads. Host code.
#pragma once

#include <algorithm>
#include <cstdint>

namespace winnow::sparse_mla::decode_cuda_detail {

struct Split {
  std::int64_t segments, segment_tiles;  // of a query (the last segment may hold fewer tiles)
};

constexpr Split split_into(std::int64_t segment_tiles, std::int64_t tiles) {
  const std::int64_t segments = (tiles + segment_tiles - 1) / segment_tiles;
  return {std::max<std::int64_t>(segments, 1), segment_tiles};
}

// The split that follows from `tiles` alone, so that the result of a query does not depend on its
// batch. Segments are long enough that merging costs little beside the products.
constexpr Split batch_invariant_split(std::int64_t tiles) {
  constexpr std::int64_t kLeastTiles = 32, kMostSegments = 8;
  return split_into(std::max(kLeastTiles, (tiles + kMostSegments - 1) / kMostSegments), tiles);
}

// As many segments as there are multiprocessors for. `items`: queries times blocks of 64 heads.
inline constexpr std::int64_t kLeastCutTiles = 2;
constexpr Split fastest_split(std::int64_t tiles, std::int64_t items,
                              std::int64_t multiprocessors) {
  const std::int64_t segments = std::max<std::int64_t>(multiprocessors / items, 1);
  return split_into(std::max(kLeastCutTiles, (tiles + segments - 1) / segments), tiles);
}

}  // namespace winnow::sparse_mla::decode_cuda_detail
