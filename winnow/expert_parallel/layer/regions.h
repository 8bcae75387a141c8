// The regions of the arena in which the rows of a call arrive, chosen alike on every rank without
// an exchange of its own: each rank's header offers its largest free extent, and until the next
// offer all ranks take the regions of their calls from the front of these. Internal.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "winnow/core/export.h"
#include "winnow/expert_parallel/exchange/exchange.h"
#include "winnow/expert_parallel/memory/arena.h"

namespace winnow::expert_parallel {

class WINNOW_EXPORT Regions {
 public:
  // Adds a segment of so many bytes to arena() at every rank and returns its number: collective.
  using Grow = std::function<std::int64_t(std::int64_t bytes)>;

  Arena& arena() { return arena_; }
  const Arena& arena() const { return arena_; }
  // After the first segment was added, all of which is free at each of `world` ranks.
  void start(int world) { free_.assign(static_cast<std::size_t>(world), arena_.largest_free()); }

  // A call begins.
  void begin();
  // `bytes` [W]: what each rank needs. False: not every rank is known to have so much.
  bool fits(std::span<const std::int64_t> bytes) const;
  // Takes the offers that were kept if all of `bytes` fits there.
  bool use_kept(std::span<const std::int64_t> bytes);
  // Where the regions lie, by rank. The caller takes its own from arena(). Calls `grow` where a
  // rank has too little, which is allowed after learn() in the same call; then for `room` bytes
  // rather than for what is needed, unless that were more than twice as much.
  std::vector<Extent> reserve(std::string_view operation, std::span<const std::int64_t> bytes,
                              std::int64_t room, const Grow& grow);
  // After learn() in a call that has reserved before its exchange: lets go of the segments that all
  // ranks can do without.
  void release_learned() { arena_.release(std::exchange(releasable_, 0)); }

  // ---- What ranks tell each other, in the headers of calls.

  void offer(Header& header) const;  // Header::rows and releasable
  // Ranks compare what they have reserved since they learned: one that refused a call which the
  // others have made, or made it with other sizes, has other free memory than they do.
  void sign(Options& options) const;
  // All headers of this call were received.
  void learn(std::uint64_t call, std::span<const Header> received);
  // The headers of `call` are received later, once a call asks for them: take_awaited() is that
  // call's number, or 0, once; keep() keeps what its headers offered.
  void await(std::uint64_t call) { awaited_ = call; }
  std::uint64_t take_awaited() {
    if (awaited_ != 0) kept_.reset();
    return std::exchange(awaited_, 0);
  }
  void keep(std::uint64_t call, std::span<const Header> received) {
    kept_ = offers_of(call, received);
  }
  // A call was refused after some ranks had reserved: they have to learn again.
  void refused(std::uint64_t call, std::span<const Header> received);

 private:
  struct Offers {
    std::uint64_t call = 0;
    std::vector<Extent> free_extents;  // [W]
    std::uint64_t releasable = 0;      // segments that all ranks can do without
  };
  static Offers offers_of(std::uint64_t call, std::span<const Header> received);
  void forget_later() {
    awaited_ = 0;
    kept_.reset();
  }

  Arena arena_;
  std::vector<Extent> free_;      // [W], what is left of them
  std::uint64_t learned_ = 0;     // the call in which they were offered
  std::uint64_t releasable_ = 0;  // of this call, until reserve()
  std::uint64_t awaited_ = 0;
  std::optional<Offers> kept_;
  bool fresh_ = false;      // learned in this call
  bool reserved_ = false;   // in this call
  std::uint64_t mark_ = 0;  // of the extents that were reserved since the free extents were learned
};

}  // namespace winnow::expert_parallel
