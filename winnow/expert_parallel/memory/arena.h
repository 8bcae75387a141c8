// The symmetric memory in which rows arrive: segments, and the regions of them that are in use.
// Internal.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "winnow/core/export.h"
#include "winnow/expert_parallel/transport/transport.h"

namespace winnow::expert_parallel {

// A stretch of an arena, named alike on every rank.
struct Extent {
  std::int64_t segment = -1;  // -1: none
  std::int64_t offset = 0;    // bytes
  std::int64_t bytes = 0;
};

// A stretch of the arena in use, which its destructor returns. It keeps the memory alive, also
// after the arena is gone. May be destroyed on any thread.
class WINNOW_EXPORT Region {
 public:
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  const Extent& extent() const { return extent_; }
  std::byte* data() const;  // at this rank

 private:
  friend class Arena;
  struct Segment;
  using FreeList = std::map<std::int64_t, std::int64_t>;  // offset -> bytes
  Region(std::shared_ptr<Segment> segment, const Extent& extent);
  std::shared_ptr<Segment> segment_;
  Extent extent_;
  FreeList::node_type entry_;  // for when it is free again: giving it back takes no memory
};

// One rank's arena. Every rank adds and releases the same segments in the same calls, so that their
// numbers agree; what is free differs from rank to rank. All calls but ~Region come from the thread
// that runs the layer's calls, so what is free can only grow between two of them.
class WINNOW_EXPORT Arena {
 public:
  static constexpr std::int64_t kAlignment = 256;  // of offsets and sizes
  static std::int64_t round_up(std::int64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  // Adds memory of all ranks and returns its number.
  std::int64_t add(std::shared_ptr<SymmetricMemory> memory);

  // The largest free stretch of all segments, the newest of equals; no bytes where all is in use.
  Extent largest_free() const;
  // Uses the first bytes (rounded up) of a free stretch.
  std::shared_ptr<Region> take(std::int64_t segment, std::int64_t offset, std::int64_t bytes);

  // Bit i: the i-th oldest segment is entirely free here, is not the newest and does not hold
  // `free extent`. Those of which every rank says so may be released.
  std::uint64_t releasable(const Extent& free_extent) const;
  void release(std::uint64_t segments);

  // Where in the arena the bytes lie, if all of them lie in one segment at this rank.
  Extent locate(const void* data, std::int64_t bytes) const;

  SymmetricMemory& memory(std::int64_t segment) const;
  // The bytes of a segment; 0 where there is none of that number.
  std::int64_t room(std::int64_t segment) const;
  std::int64_t bytes() const;            // of all segments
  std::int64_t largest_segment() const;  // bytes
  // Of the segment to add where a region of `missing` bytes has no room.
  std::int64_t grown_for(std::int64_t missing) const;
  // Lets go of every segment; those with regions in use live on with them.
  void close() { segments_.clear(); }

 private:
  const std::shared_ptr<Region::Segment>& find(std::int64_t segment) const;
  std::vector<std::shared_ptr<Region::Segment>> segments_;  // oldest first
  std::int64_t added_ = 0;
};

// Takes a region of `bytes` [W] for each rank from the front of its free extent, alike on every
// rank. Where a free extent is too small, grow(missing) adds a segment of at least so many bytes at
// every rank and returns it as a free extent; all free extents that are smaller are given up for
// it, so that later regions have as much room on every rank.
template <class Grow>
std::vector<Extent> take_regions(std::span<Extent> free_extents,
                                 std::span<const std::int64_t> bytes, const Grow& grow) {
  std::int64_t missing = 0;  // the most that a rank without room needs
  for (std::size_t rank = 0; rank < free_extents.size(); ++rank) {
    const std::int64_t wanted = Arena::round_up(bytes[rank]);
    if (free_extents[rank].segment >= 0 && wanted <= free_extents[rank].bytes) continue;
    missing = std::max(missing, wanted);
    free_extents[rank] = {};
  }
  if (missing > 0) {
    const Extent grown = grow(missing);
    for (Extent& free_extent : free_extents) {
      if (free_extent.bytes < missing) free_extent = grown;
    }
  }
  std::vector<Extent> regions;
  for (std::size_t rank = 0; rank < free_extents.size(); ++rank) {
    Extent& free_extent = free_extents[rank];
    regions.push_back({free_extent.segment, free_extent.offset, bytes[rank]});
    free_extent.offset += Arena::round_up(bytes[rank]);
    free_extent.bytes -= Arena::round_up(bytes[rank]);
  }
  return regions;
}

}  // namespace winnow::expert_parallel
