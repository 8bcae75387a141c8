#include "winnow/expert_parallel/memory/arena.h"

#include <algorithm>
#include <iterator>
#include <mutex>
#include <utility>

#include "winnow/core/error.h"

namespace winnow::expert_parallel {

// Regions hold their segment, so memory goes when neither arena nor region needs it any more.
struct Region::Segment {
  std::int64_t number = 0;
  std::shared_ptr<SymmetricMemory> memory;
  std::int64_t bytes = 0;
  std::mutex mutex;
  FreeList free;  // neighbours are joined

  void give_back(FreeList::node_type entry) {
    const std::lock_guard lock(mutex);
    auto here = free.insert(std::move(entry)).position;
    const auto next = std::next(here);
    if (next != free.end() && here->first + here->second == next->first) {
      here->second += next->second;
      free.erase(next);
    }
    if (here == free.begin()) return;
    const auto previous = std::prev(here);
    if (previous->first + previous->second != here->first) return;
    previous->second += here->second;
    free.erase(here);
  }

  Extent largest_free() {
    const std::lock_guard lock(mutex);
    const auto largest = std::max_element(
        free.begin(), free.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
    if (largest == free.end()) return {};
    return {number, largest->first, largest->second};
  }

  // What was offered may have joined with its neighbours since.
  void take(std::int64_t offset, std::int64_t wanted) {
    const std::lock_guard lock(mutex);
    auto free_extent = free.upper_bound(offset);
    const bool before = free_extent != free.begin() &&
                        (--free_extent)->first + free_extent->second >= offset + wanted;
    if (!before) {
      throw Error(ErrorCode::internal, "expert_parallel::Arena",
                  "the hole that was offered is gone");
    }
    const std::int64_t end = free_extent->first + free_extent->second;
    if (end > offset + wanted) free.emplace(offset + wanted, end - offset - wanted);
    free_extent->second = offset - free_extent->first;
    if (free_extent->second == 0) free.erase(free_extent);
  }
};

Region::Region(std::shared_ptr<Segment> segment, const Extent& extent)
    : segment_(std::move(segment)), extent_(extent) {
  FreeList entry;
  entry.emplace(0, 0);
  entry_ = entry.extract(entry.begin());
}

Region::~Region() {
  if (extent_.bytes == 0) return;
  entry_.key() = extent_.offset;
  entry_.mapped() = extent_.bytes;
  segment_->give_back(std::move(entry_));
}

std::byte* Region::data() const { return segment_->memory->local() + extent_.offset; }

std::int64_t Arena::add(std::shared_ptr<SymmetricMemory> memory) {
  auto segment = std::make_shared<Region::Segment>();
  segment->number = added_;
  segment->bytes = static_cast<std::int64_t>(memory->bytes()) / kAlignment * kAlignment;
  segment->memory = std::move(memory);
  segment->free.emplace(0, segment->bytes);
  segments_.push_back(std::move(segment));
  return added_++;
}

Extent Arena::largest_free() const {
  Extent largest;
  for (const auto& segment : segments_) {
    const Extent free_extent = segment->largest_free();
    if (free_extent.bytes >= largest.bytes && free_extent.segment >= 0) largest = free_extent;
  }
  return largest;
}

std::shared_ptr<Region> Arena::take(std::int64_t segment, std::int64_t offset, std::int64_t bytes) {
  const Extent extent{segment, offset, round_up(bytes)};
  const auto owner = find(segment);
  auto region = std::shared_ptr<Region>(new Region(owner, Extent{segment, offset, 0}));
  if (extent.bytes > 0) owner->take(offset, extent.bytes);
  region->extent_ = extent;
  return region;
}

std::uint64_t Arena::releasable(const Extent& free_extent) const {
  std::uint64_t unused = 0;
  for (std::size_t i = 0; i + 1 < segments_.size() && i < 64; ++i) {
    const bool whole = segments_[i]->largest_free().bytes == segments_[i]->bytes;
    if (whole && segments_[i]->number != free_extent.segment) unused |= std::uint64_t{1} << i;
  }
  return unused;
}

void Arena::release(std::uint64_t segments) {
  for (std::size_t i = std::min<std::size_t>(segments_.size(), 64); i-- > 0;) {
    if (segments >> i & 1) segments_.erase(segments_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

Extent Arena::locate(const void* data, std::int64_t bytes) const {
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  for (const auto& segment : segments_) {
    const auto base = reinterpret_cast<std::uintptr_t>(segment->memory->local());
    const auto size = static_cast<std::uintptr_t>(segment->bytes);
    if (begin < base || begin - base > size) continue;
    const std::uintptr_t offset = begin - base;
    if (static_cast<std::uintptr_t>(bytes) > size - offset) continue;
    return {segment->number, static_cast<std::int64_t>(offset), bytes};
  }
  return {};
}

SymmetricMemory& Arena::memory(std::int64_t segment) const { return *find(segment)->memory; }

std::int64_t Arena::room(std::int64_t segment) const {
  const auto found =
      std::ranges::find_if(segments_, [&](const auto& one) { return one->number == segment; });
  return found == segments_.end() ? 0 : (*found)->bytes;
}

std::int64_t Arena::bytes() const {
  std::int64_t sum = 0;
  for (const auto& segment : segments_) sum += segment->bytes;
  return sum;
}

std::int64_t Arena::largest_segment() const {
  std::int64_t largest = 0;
  for (const auto& segment : segments_) largest = std::max(largest, segment->bytes);
  return largest;
}

std::int64_t Arena::grown_for(std::int64_t missing) const {
  return round_up(std::max(missing, 2 * largest_segment()));
}

const std::shared_ptr<Region::Segment>& Arena::find(std::int64_t number) const {
  for (const auto& segment : segments_) {
    if (segment->number == number) return segment;
  }
  throw Error(ErrorCode::internal, "expert_parallel::Arena",
              "there is no segment " + std::to_string(number));
}

}  // namespace winnow::expert_parallel
