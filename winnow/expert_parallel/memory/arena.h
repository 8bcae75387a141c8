// The symmetric memory in which rows arrive: segments, and the regions of them that are in use.
// Internal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
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

// A stretch of the arena in use; gives it back when it goes. Keeps the memory alive, also beyond
// the arena. May be destroyed on any thread.
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
  Region(std::shared_ptr<Segment> segment, const Extent& extent);
  std::shared_ptr<Segment> segment_;
  Extent extent_;
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
  Extent largest_hole() const;
  // Uses the first bytes (rounded up) of a free stretch.
  std::shared_ptr<Region> take(std::int64_t segment, std::int64_t offset, std::int64_t bytes);

  // Bit i: the i-th oldest segment is entirely free here, is not the newest and does not hold
  // `hole`. Those of which every rank says so may be released.
  std::uint64_t releasable(const Extent& hole) const;
  void release(std::uint64_t segments);

  // Where in the arena the bytes lie, if all of them lie in one segment at this rank.
  Extent locate(const void* data, std::int64_t bytes) const;

  SymmetricMemory& memory(std::int64_t segment) const;
  std::int64_t bytes() const;            // of all segments
  std::int64_t largest_segment() const;  // bytes
  // Lets go of every segment; those with regions in use live on with them.
  void close() { segments_.clear(); }

 private:
  const std::shared_ptr<Region::Segment>& find(std::int64_t segment) const;
  std::vector<std::shared_ptr<Region::Segment>> segments_;  // oldest first
  std::int64_t added_ = 0;
};

}  // namespace winnow::expert_parallel
