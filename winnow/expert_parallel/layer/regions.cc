#include "winnow/expert_parallel/layer/regions.h"

#include <algorithm>
#include <string>

#include "winnow/core/error.h"

namespace winnow::expert_parallel {

void Regions::begin() {
  fresh_ = reserved_ = false;
  releasable_ = 0;
}

bool Regions::fits(std::span<const std::int64_t> bytes) const {
  for (std::size_t rank = 0; rank < free_.size(); ++rank) {
    if (free_[rank].segment < 0 || Arena::round_up(bytes[rank]) > free_[rank].bytes) return false;
  }
  return true;
}

bool Regions::use_kept(std::span<const std::int64_t> bytes) {
  if (!kept_) return false;
  const std::vector<Extent> known = std::exchange(free_, kept_->free_extents);
  if (!fits(bytes)) {
    free_ = known;  // the exchange of this call will tell more
    return false;
  }
  learned_ = kept_->call;
  mark_ = 0;
  kept_.reset();
  return true;
}

std::vector<Extent> Regions::reserve(std::string_view operation,
                                     std::span<const std::int64_t> bytes, std::int64_t room,
                                     const Grow& grow) {
  release_learned();
  forget_later();  // it may be the free extent that is taken from now
  const std::vector<Extent> regions = take_regions(free_, bytes, [&](std::int64_t missing) {
    if (!fresh_) {
      throw Error(ErrorCode::internal, std::string(operation), "no room without learn()");
    }
    const std::int64_t grown =
        arena_.grown_for(room <= 2 * missing ? std::max(missing, room) : missing);
    return Extent{grow(grown), 0, grown};
  });
  for (const Extent& region : regions) {
    for (const std::int64_t value : {region.segment, region.offset, region.bytes}) {
      mark_ = (mark_ ^ std::uint64_t(value)) * 0x100000001b3u;  // FNV-1a
    }
  }
  reserved_ = true;
  return regions;
}

void Regions::offer(Header& header) const {
  header.rows = arena_.largest_free();
  header.releasable = arena_.releasable(header.rows);
}

void Regions::sign(Options& options) const {
  if (reserved_) options.regions = 1 + std::int64_t(mark_ >> 2);
}

Regions::Offers Regions::offers_of(std::uint64_t call, std::span<const Header> received) {
  Offers offers{call, {}, ~std::uint64_t{0}};
  for (const Header& header : received) {
    offers.free_extents.push_back(header.rows);
    offers.releasable &= header.releasable;
  }
  return offers;
}

void Regions::learn(std::uint64_t call, std::span<const Header> received) {
  Offers offers = offers_of(call, received);
  learned_ = call;
  free_ = std::move(offers.free_extents);
  // Not of offers that are kept: a rank that refuses the call would keep the segments.
  releasable_ = offers.releasable;
  forget_later();
  fresh_ = true;
  mark_ = 0;
}

// Ranks that refused the call have reserved nothing. What was learned since, all have learned.
void Regions::refused(std::uint64_t call, std::span<const Header> received) {
  const auto reserved = [](const Header& header) { return header.options.regions > 0; };
  if (call < learned_ || std::ranges::none_of(received, reserved)) return;
  free_.assign(free_.size(), {});
  forget_later();
}

}  // namespace winnow::expert_parallel
