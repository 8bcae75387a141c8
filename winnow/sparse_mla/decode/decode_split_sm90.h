// How the kernel of sm90 splits the tiles of each query. Host code.
#pragma once

#include <algorithm>
#include <cstdint>

namespace winnow::sparse_mla::decode_sm90_detail {

// Each query's tiles are cut into `segments` ranges of `tiles` (the last may be shorter). Where
// there are several, their results are merged.
struct Split {
  std::int64_t segments, tiles;
};

// Ranges of `length` tiles, at least one range.
constexpr Split split_by(std::int64_t length, std::int64_t tiles) {
  return {std::max<std::int64_t>((tiles + length - 1) / length, 1), length};
}

// The split that does not hang on the batch: long enough that merging costs little beside the
// products, short enough that a few queries make use of several multiprocessors.
constexpr Split batch_invariant_split(std::int64_t tiles) {
  constexpr std::int64_t kLeastTiles = 16, kMostSegments = 8;
  const std::int64_t length = std::max(kLeastTiles, (tiles + kMostSegments - 1) / kMostSegments);
  return split_by(length, tiles);
}

// Items (head blocks of queries) that are split are no more than this, which bounds the workspace.
constexpr std::int64_t most_split_items(std::int64_t multiprocessors) {
  return 4 * multiprocessors;
}

// The split that is fastest for so many head blocks of queries, by an estimate in which a tile
// takes the time 1.
constexpr Split fastest_split(std::int64_t tiles, std::int64_t head_blocks,
                              std::int64_t multiprocessors) {
  constexpr double kBegin = 3;           // of an item: the first rows, and its output
  constexpr double kPartial = 2;         // more, where the output is in f32 and merged
  constexpr double kMerge = 2;           // the launch of the merge
  constexpr double kMergedItem = 0.017;  // 128 KB read
  Split fastest{1, std::max<std::int64_t>(tiles, 1)};
  double least = 0;
  for (std::int64_t segments = 1; segments <= std::max<std::int64_t>(tiles, 1); ++segments) {
    const std::int64_t length = std::max<std::int64_t>((tiles + segments - 1) / segments, 1);
    const Split split = split_by(length, tiles);
    if (split.segments != segments) continue;
    const std::int64_t items = head_blocks * segments;
    if (segments > 1 && items > most_split_items(multiprocessors)) break;
    const auto rounds = static_cast<double>((items + multiprocessors - 1) / multiprocessors);
    const double time =
        rounds * (static_cast<double>(split.tiles) + kBegin) +
        (segments == 1 ? 0 : rounds * kPartial + kMerge + kMergedItem * static_cast<double>(items));
    if (segments == 1 || time < least) {
      least = time;
      fastest = split;
    }
  }
  return fastest;
}

}  // namespace winnow::sparse_mla::decode_sm90_detail
