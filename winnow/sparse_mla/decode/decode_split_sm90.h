// How the kernel of sm90 shares out the tiles of all queries. Host code.
//
// The tiles of each query are cut into segments. A group is one thread block for each head block of
// 64 heads. It computes a number of whole segments and, if cut_tiles > 0, before them an equal
// share of the tiles of the last queries, taken as one long row of tiles. A share that reaches over
// the end of a query is cut there, so that every piece of work is of one query.
//
// Or a query is a sum of parts, its segments, whose lengths follow from the number of its tiles
// alone, so that its bits hang on nothing else. Groups that have all segments of a query merge them
// themselves; what such groups would leave over is shared out by segments, which a second kernel
// merges.
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
  // Whether a group merges its whole segments, which are of whole queries; each group has so many
  // segments of the queries that remain.
  bool merges = false;
  std::int64_t cut_segments = 0;

  // Whether a block has so few tiles that what it does once takes most of its time.
  constexpr bool is_short() const {
    return !merges && group_segments * segment_tiles + cut_tiles <= kShortTiles;
  }
  // The most parts that a query is cut into, which selects the kernel that merges them. If
  // cut_tiles does not divide the query's tiles, a share may begin at any of them.
  constexpr std::int64_t most_parts() const {
    if (cut_tiles == 0) return segments;
    return segment_tiles % cut_tiles == 0 ? segment_tiles / cut_tiles
                                          : (segment_tiles - 2) / cut_tiles + 2;
  }

  static constexpr std::int64_t kShortTiles = 16;
  // The most parts that a block can merge, or a block of the second kernel for several heads.
  static constexpr std::uint32_t kFewParts = 4;
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

// The tiles of a part of a query, at least: half a thousand rows. Fewer make calls of one or two
// sequences quicker and all others slower (docs/notes/decode.md).
inline constexpr std::int64_t kPartTiles = 8;

// The split whose segments follow from `tiles` alone: up to four of kPartTiles or more, and of long
// lists, beside which merging costs little, up to eight of twice as many or more.
constexpr Split batch_invariant_split(std::int64_t tiles, std::int64_t queries,
                                      std::int64_t groups) {
  constexpr std::int64_t kFew = Split::kFewParts;
  const std::int64_t length = tiles <= 2 * kFew * kPartTiles
                                  ? std::max(kPartTiles, round_up_div(tiles, kFew))
                                  : std::max(2 * kPartTiles, round_up_div(tiles, 2 * kFew));
  const std::int64_t segments = std::max<std::int64_t>(round_up_div(tiles, length), 1);
  Split split = split_whole(segments, length, queries, groups);
  // Whole queries of each group, and the segments of the rest; another whole query where these are
  // as many.
  std::int64_t each = queries / groups;
  std::int64_t cut = round_up_div((queries - each * groups) * segments, groups);
  if (cut == segments) ++each, cut = 0;
  if (segments == 1 || segments > kFew || each == 0) return split;
  if (each * segments + cut > kMostPieces) each = kMostPieces / segments, cut = 0;
  split.merges = true;
  split.group_segments = each * segments;
  split.cut_segments = cut;
  split.groups = cut > 0 ? groups : round_up_div(queries, each);
  return split;
}

// The split in which every query is in one go.
constexpr Split split_of_whole_queries(std::int64_t tiles, std::int64_t queries,
                                       std::int64_t groups) {
  return split_whole(1, std::max<std::int64_t>(tiles, 1), queries, groups);
}

// The fastest split: each group takes queries / groups whole queries and an equal share of the
// tiles of the rest, or whole queries alone if the shares save no more than kMerge tiles.
constexpr Split fastest_split(std::int64_t tiles, std::int64_t queries, std::int64_t groups) {
  constexpr std::int64_t kMerge = 5;  // tiles in the time of writing and merging partial sums
  const std::int64_t length = std::max<std::int64_t>(tiles, 1);
  const Split whole = split_of_whole_queries(tiles, queries, groups);
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
