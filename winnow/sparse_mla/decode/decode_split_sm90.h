// How the kernel of sm90 shares out the tiles of all queries. Host code.
//
// A head block is 64 heads. A group of blocks, one for each head block, takes pieces of the
// queries: whole segments, into which the tiles of each query are cut, and maybe a share of the
// last queries' tiles, which stand one behind the other. No piece of work reaches over the end of a
// query.
#pragma once

#include <algorithm>
#include <cstdint>

namespace winnow::sparse_mla::decode_sm90_detail {

struct Split {
  std::int64_t segments, segment_tiles;  // of a query (the last segment may hold fewer tiles)
  // Each group takes so many segments, the first ones of all; of the other queries' tiles so many,
  // or none if this is 0.
  std::int64_t group_segments, cut_tiles;
  std::int64_t groups;

  // Whether every block is through after some tiles, so that what it does once takes the time.
  constexpr bool is_short() const {
    return group_segments * segment_tiles + cut_tiles <= kShortTiles;
  }
  // Of a query. Shares that do not divide it may begin anywhere in it.
  constexpr std::int64_t most_parts() const {
    if (cut_tiles == 0) return segments;
    return segment_tiles % cut_tiles == 0 ? segment_tiles / cut_tiles
                                          : (segment_tiles - 2) / cut_tiles + 2;
  }

  static constexpr std::int64_t kShortTiles = 16;
};

// Pieces of a block, whose table stands in shared memory.
inline constexpr int kMostPieces = 128;

// Groups that run at once.
constexpr std::int64_t resident_groups(std::int64_t head_blocks, std::int64_t multiprocessors) {
  return std::max<std::int64_t>(multiprocessors / head_blocks, 1);
}

constexpr std::int64_t round_up_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Groups of whole segments.
constexpr Split split_whole(std::int64_t segments, std::int64_t segment_tiles, std::int64_t queries,
                            std::int64_t groups) {
  const std::int64_t all = queries * segments;
  const std::int64_t each = std::min<std::int64_t>(round_up_div(all, groups), kMostPieces);
  return {segments, segment_tiles, each, 0, round_up_div(all, each)};
}

// The split whose segments do not hang on the batch: long enough that merging costs little beside
// the products, short enough that a few queries make use of several multiprocessors.
constexpr Split batch_invariant_split(std::int64_t tiles, std::int64_t queries,
                                      std::int64_t groups) {
  constexpr std::int64_t kLeastTiles = 16, kMostSegments = 8;
  const std::int64_t length = std::max(kLeastTiles, round_up_div(tiles, kMostSegments));
  return split_whole(std::max<std::int64_t>(round_up_div(tiles, length), 1), length, queries,
                     groups);
}

// The split that is fastest for so many queries: each group takes as many queries as the others,
// and of those that are left as many tiles, unless whole queries do nearly as well.
constexpr Split fastest_split(std::int64_t tiles, std::int64_t queries, std::int64_t groups) {
  constexpr std::int64_t kMerge = 5;  // its time, and that of the sums of parts, in tiles
  const std::int64_t length = std::max<std::int64_t>(tiles, 1);
  const Split whole = split_whole(1, length, queries, groups);
  const std::int64_t each = queries / groups, left = queries % groups;
  const std::int64_t cut = round_up_div(left * length, groups);
  // The kernel counts the tiles of all groups in 32 bits. A share reaches into two queries at most.
  if (left == 0 || each > kMostPieces - 2 || groups * length >= std::int64_t{1} << 31 ||
      length <= cut + kMerge) {
    return whole;
  }
  return {1, length, each, cut, each > 0 ? groups : round_up_div(left * length, cut)};
}

}  // namespace winnow::sparse_mla::decode_sm90_detail
