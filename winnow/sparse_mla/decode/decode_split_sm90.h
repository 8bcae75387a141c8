// How the kernel of sm90 shares out the tiles of all queries. Host code.
//
// The tiles of each query are cut into segments. A group is one thread block for each head block of
// 64 heads. It computes a number of whole segments and, if cut_tiles > 0, before them an equal
// share of the tiles of the last queries, taken as one long row of tiles. A share that reaches over
// the end of a query is cut there, so that every piece of work is of one query.
#pragma once

#include <algorithm>
#include <cstdint>

namespace winnow::sparse_mla::decode_sm90_detail {

struct Split {
  std::int64_t segments, segment_tiles;  // of a query (the last segment may hold fewer tiles)
  // Whole segments of each group, from the first query on, and tiles of each group's share of the
  // queries that remain (0: none remain).
  std::int64_t group_segments, cut_tiles;
  std::int64_t groups;

  // Whether a block has so few tiles that what it does once takes most of its time.
  constexpr bool is_short() const {
    return group_segments * segment_tiles + cut_tiles <= kShortTiles;
  }
  // The most parts that a query is cut into, which selects the kernel that merges them. If
  // cut_tiles does not divide the query's tiles, a share may begin at any of them.
  constexpr std::int64_t most_parts() const {
    if (cut_tiles == 0) return segments;
    return segment_tiles % cut_tiles == 0 ? segment_tiles / cut_tiles
                                          : (segment_tiles - 2) / cut_tiles + 2;
  }

  static constexpr std::int64_t kShortTiles = 16;
};

// The most pieces of a block: its table of them is in shared memory.
inline constexpr int kMostPieces = 128;

// The groups that run at once.
constexpr std::int64_t resident_groups(std::int64_t head_blocks, std::int64_t multiprocessors) {
  return std::max<std::int64_t>(multiprocessors / head_blocks, 1);
}

constexpr std::int64_t round_up_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// The split into whole segments alone, as evenly as possible.
constexpr Split split_whole(std::int64_t segments, std::int64_t segment_tiles, std::int64_t queries,
                            std::int64_t groups) {
  const std::int64_t all = queries * segments;
  const std::int64_t each = std::min<std::int64_t>(round_up_div(all, groups), kMostPieces);
  return {segments, segment_tiles, each, 0, round_up_div(all, each)};
}

// The split whose segment length follows from `tiles` alone, so that the result of a query does not
// depend on its batch. Segments are long enough that merging costs little beside the products,
// short enough that a few queries make use of several multiprocessors.
constexpr Split batch_invariant_split(std::int64_t tiles, std::int64_t queries,
                                      std::int64_t groups) {
  constexpr std::int64_t kLeastTiles = 16, kMostSegments = 8;
  const std::int64_t length = std::max(kLeastTiles, round_up_div(tiles, kMostSegments));
  return split_whole(std::max<std::int64_t>(round_up_div(tiles, length), 1), length, queries,
                     groups);
}

// The fastest split: each group takes queries / groups whole queries and an equal share of the
// tiles of the rest, or whole queries alone if the shares save no more than kMerge tiles.
constexpr Split fastest_split(std::int64_t tiles, std::int64_t queries, std::int64_t groups) {
  constexpr std::int64_t kMerge = 5;  // tiles in the time of writing and merging partial sums
  const std::int64_t length = std::max<std::int64_t>(tiles, 1);
  const Split whole = split_whole(1, length, queries, groups);
  const std::int64_t each = queries / groups, left = queries % groups;
  const std::int64_t cut = round_up_div(left * length, groups);
  // The kernel counts the tiles of all groups in 32 bits. A share is at most two pieces, which have
  // to fit the table beside the whole queries.
  if (left == 0 || each > kMostPieces - 2 || groups * length >= std::int64_t{1} << 31 ||
      length <= cut + kMerge) {
    return whole;
  }
  return {1, length, each, cut, each > 0 ? groups : round_up_div(left * length, cut)};
}

}  // namespace winnow::sparse_mla::decode_sm90_detail
