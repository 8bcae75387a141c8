// Memory that only this rank uses, which it allocates once and uses again. Internal.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "winnow/expert_parallel/memory/arena.h"
#include "winnow/expert_parallel/transport/communicator.h"

namespace winnow::expert_parallel {

class OwnMemory {
 public:
  // Memory of at least so many bytes, or an exception.
  using Allocate = std::function<std::shared_ptr<SymmetricMemory>(std::int64_t bytes)>;

  OwnMemory(std::int64_t bytes, Allocate allocate) : allocate_(std::move(allocate)) {
    arena_.add(allocate_(bytes));
  }

  // Later calls may use it again, in their order, when its last owner lets go. Never null. Throws
  // what the allocation throws where more is needed.
  std::shared_ptr<Region> keep(std::int64_t bytes) {
    bytes = std::max<std::int64_t>(bytes, 1);
    Extent free_extent = arena_.largest_free();
    if (free_extent.bytes < Arena::round_up(bytes)) {
      const std::int64_t grown = Arena::round_up(std::max(bytes, 2 * arena_.largest_segment()));
      free_extent = {arena_.add(allocate_(grown)), 0, grown};
    }
    return arena_.take(free_extent.segment, free_extent.offset, bytes);
  }

 private:
  Allocate allocate_;
  Arena arena_;
};

}  // namespace winnow::expert_parallel
