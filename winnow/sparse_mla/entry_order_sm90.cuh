// Puts the entries of a query in the order of their rows. The blocks of a kernel then walk through
// the cache together, so that a row that one of them has read is still in L2 when another wants it.
//
// The order is by ranges of rows, and within a range that of the list. It depends on the list
// alone, so that sums in this order are the same in every run.
#pragma once

#include <cstdint>

#include "winnow/device/common/math.cuh"
#include "winnow/device/common/shared.cuh"
#include "winnow/device/common/warp.cuh"
#include "winnow/device/sm90/barrier.cuh"
#include "winnow/sparse_mla/gather_sm90.cuh"

namespace winnow::sparse_mla {

// Longer lists are put in order by segments.
inline constexpr int kSegmentTiles = 32;
inline constexpr int kSegmentEntries = kSegmentTiles * kTileRows;
inline constexpr int kOrderRanges = 32;

// In shared memory.
struct EntrySegment {
  std::int32_t entries[kSegmentEntries];
};

// Finds the lanes of a warp whose entries are in a given range.
class LanesByRange {
 public:
  // Entries that are not rows are in the last range.
  __device__ __forceinline__ LanesByRange(std::int32_t entry, bool exists, int shift)
      : range_(static_cast<int>(
            min(static_cast<std::uint32_t>(entry) >> shift, std::uint32_t{kOrderRanges - 1}))),
        exist_(__ballot_sync(device::kFullWarp, exists)) {
#pragma unroll
    for (int bit = 0; bit < 5; ++bit) {
      bits_[bit] = __ballot_sync(device::kFullWarp, range_ >> bit & 1);
    }
  }
  __device__ __forceinline__ int range() const { return range_; }  // of the lane's own entry
  __device__ __forceinline__ std::uint32_t with(int range) const {
    std::uint32_t lanes = exist_;
#pragma unroll
    for (int bit = 0; bit < 5; ++bit) lanes &= range >> bit & 1 ? bits_[bit] : ~bits_[bit];
    return lanes;
  }

 private:
  int range_;
  std::uint32_t exist_, bits_[5];
};

// Writes the first `count` entries of `list` into a segment, in order. All kGatherThreads threads
// of a warpgroup call it, each after its last read of the segment's old contents. kBarrier is a
// named barrier of theirs.
template <int kBarrier>
__device__ __forceinline__ void order_segment(std::uint32_t segment, const std::int32_t* list,
                                              int count, int shift, int thread) {
  constexpr int kWarps = kGatherThreads / 32, kBatch = 4;  // loads under way
  const int warp = thread / 32, lane = thread % 32;
  const int part = device::ceil_div(device::ceil_div(count, kWarps), 32) * 32;
  const int begin = warp * part, end = min(count, begin + part);
  const auto walk = [&](auto&& visit) {
#pragma unroll 1
    for (int first = begin; first < end; first += 32 * kBatch) {
      std::int32_t entries[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int at = first + 32 * i + lane;
        entries[i] = at < end ? __ldg(list + at) : -1;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const bool exists = first + 32 * i + lane < end;
        visit(entries[i], exists, LanesByRange(entries[i], exists, shift));
      }
    }
  };
  int counted = 0;  // of the warp's entries, those of range `lane`
  walk([&](std::int32_t, bool, const LanesByRange& lanes) { counted += __popc(lanes.with(lane)); });
  device::bar_sync<kGatherThreads>(kBarrier);  // nobody reads the segment before any more
  device::st_shared(segment + 4 * thread, counted);
  device::bar_sync<kGatherThreads>(kBarrier);
  // Of range `lane`: where this warp's next entry of it goes, and how many entries it has.
  int place = 0, total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const int others = device::ld_shared<int>(segment + 4 * (32 * w + lane));
    if (w < warp) place += others;
    total += others;
  }
  place += device::warp_prefix(total, lane) - total;
  device::bar_sync<kGatherThreads>(kBarrier);
  walk([&](std::int32_t entry, bool exists, const LanesByRange& lanes) {
    const int first = __shfl_sync(device::kFullWarp, place, lanes.range());
    const int rank = __popc(lanes.with(lanes.range()) & ((1u << lane) - 1));
    // A list that is rewritten meanwhile may have other counts now.
    if (exists && first + rank < kSegmentEntries) {
      device::st_shared(segment + 4 * (first + rank), entry);
    }
    place += __popc(lanes.with(lane));
  });
  device::bar_sync<kGatherThreads>(kBarrier);
}

// Like load_tile(), but from an ordered segment that holds `entries` entries.
__device__ __forceinline__ TileEntries load_ordered_tile(std::uint32_t segment, int tile,
                                                         int entries, int lane) {
  const int first = tile * kTileRows + lane;
  TileEntries loaded{-1, -1};
  if (first < entries) loaded.low = device::ld_shared<std::int32_t>(segment + 4 * first);
  if (first + 32 < entries)
    loaded.high = device::ld_shared<std::int32_t>(segment + 4 * first + 128);
  return loaded;
}

}  // namespace winnow::sparse_mla
