// How the kernels of sm90 share out the tiles of all queries. Host code.
//
// A group is one thread block for each head block of 64 heads. It computes a number of whole
// queries and, if cut_tiles > 0, before them an equal share of the tiles of the last queries, taken
// as one long row of tiles. A share that reaches over the end of a query is cut there, so that
// every piece of work is of one query.
//
// With batch_invariant or in_list_order every sum of a query is one chain over its entries in their
// order, which is not cut. Where there are enough queries, a block has all of one for 64 heads.
// Where there are few, blocks work on a query side by side (decode_chain_sm90.cuh).
#pragma once

#include <algorithm>
#include <cstdint>

namespace winnow::sparse_mla::decode_sm90_detail {

struct Split {
  std::int64_t query_tiles;
  // Whole queries of each group, from the first one on, and tiles of each group's share of those
  // that remain (0: none remain).
  std::int64_t group_queries, cut_tiles;
  std::int64_t groups;

  // Whether a block has so few tiles that what it does once takes most of its time.
  constexpr bool is_short() const { return group_queries * query_tiles + cut_tiles <= kShortTiles; }
  // The most parts that a query is cut into, which selects the kernel that merges them. If
  // cut_tiles does not divide the query's tiles, a share may begin at any of them.
  constexpr std::int64_t most_parts() const {
    if (cut_tiles == 0) return 1;
    return query_tiles % cut_tiles == 0 ? query_tiles / cut_tiles
                                        : (query_tiles - 2) / cut_tiles + 2;
  }

  static constexpr std::int64_t kShortTiles = 16;
  // The most parts that a block of the second kernel merges for several heads.
  static constexpr std::uint32_t kFewParts = 4;
};

// The most pieces of a block: its table of them is in shared memory.
inline constexpr int kMostPieces = 128;

// The groups that run at once.
constexpr std::int64_t resident_groups(std::int64_t head_blocks, std::int64_t multiprocessors) {
  return std::max<std::int64_t>(multiprocessors / head_blocks, 1);
}

constexpr std::int64_t round_up_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// The split in which every query is in one go, as evenly as possible.
constexpr Split split_of_whole_queries(std::int64_t tiles, std::int64_t queries,
                                       std::int64_t groups) {
  const std::int64_t each = std::min<std::int64_t>(round_up_div(queries, groups), kMostPieces);
  return {std::max<std::int64_t>(tiles, 1), each, 0, round_up_div(queries, each)};
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
  return {length, each, cut, each > 0 ? groups : round_up_div(left * length, cut)};
}

// How blocks work on the queries of a call side by side: `segments` on the logits of a query, each
// of so many tiles, then one for each run of so many tiles on the weights, and `column_blocks` on
// the values.
struct ChainSplit {
  std::int64_t segments, segment_tiles, run_tiles, column_blocks;
};

// Items are blocks of 64 heads of queries. Of more than these, or with fewer tiles, one block each
// is faster; the last number is of the tiles of all items, which the workspace has room for.
constexpr std::int64_t most_chain_items(std::int64_t multiprocessors) {
  return multiprocessors / 4;
}
inline constexpr std::int64_t kLeastChainTiles = 5, kMostChainTiles = 8192;

constexpr bool works_side_by_side(std::int64_t tiles, std::int64_t items,
                                  std::int64_t multiprocessors) {
  return tiles >= kLeastChainTiles && items <= most_chain_items(multiprocessors) &&
         items * tiles <= kMostChainTiles;
}
// The most tiles of all items of such a call, and of those with fewer queries or entries.
constexpr std::int64_t chain_tiles_for(std::int64_t tiles, std::int64_t items,
                                       std::int64_t multiprocessors) {
  if (tiles < kLeastChainTiles) return 0;
  return std::min(std::min(items, most_chain_items(multiprocessors)) * tiles, kMostChainTiles);
}

constexpr ChainSplit chain_split(std::int64_t tiles, std::int64_t queries, std::int64_t head_blocks,
                                 std::int64_t multiprocessors) {
  constexpr std::int64_t kRuns = 32;
  const std::int64_t groups = resident_groups(head_blocks, multiprocessors);
  const std::int64_t segment_tiles =
      round_up_div(tiles, std::max<std::int64_t>(groups / queries, 1));
  return {round_up_div(tiles, segment_tiles), segment_tiles, round_up_div(tiles, kRuns),
          queries * head_blocks * 8 <= multiprocessors ? 8 : 4};
}

}  // namespace winnow::sparse_mla::decode_sm90_detail
