// Who knows of whose actions: vector clocks.
//
// Actors are the threads of a block, its warpgroups as far as their matrix products go, and the
// phases of its mbarriers. An action of an actor has a stamp: the actor and its count at the time.
// A thread knows of the action if its clock holds that count of the actor, or a higher one: then
// the action has happened before what the thread does from then on, whatever the schedule.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace winnow::simulator {

using Actor = std::uint32_t;

// Of an asynchronous operation the stamp is not known before somebody waits for it: until then a
// stamp names the operation.
struct Stamp {
  std::uint64_t bits = 0;  // 0: nothing has happened yet

  static constexpr std::uint64_t kOperation = std::uint64_t{1} << 63;
  static Stamp of(Actor actor, std::uint32_t count) { return {std::uint64_t{actor} << 32 | count}; }
  static Stamp of_operation(std::uint64_t number) { return {kOperation | number}; }
  bool none() const { return bits == 0; }
  bool is_operation() const { return (bits & kOperation) != 0; }
  std::uint64_t operation() const { return bits & ~kOperation; }
  Actor actor() const { return static_cast<Actor>(bits >> 32); }
  std::int32_t count() const { return static_cast<std::int32_t>(bits & 0x7fffffff); }
  bool operator==(const Stamp&) const = default;
};

class Clock {
 public:
  void reset(std::size_t actors) { counts_.assign(actors, 0); }
  std::int32_t& operator[](Actor actor) { return counts_[actor]; }
  bool knows(Stamp stamp) const { return counts_[stamp.actor()] >= stamp.count(); }
  void join(const Clock& other) {
    std::int32_t* const mine = counts_.data();
    const std::int32_t* const others = other.counts_.data();
    const std::size_t size = counts_.size();
    for (std::size_t i = 0; i < size; ++i) mine[i] = std::max(mine[i], others[i]);
  }

 private:
  std::vector<std::int32_t> counts_;
};

// What a thread knows of: for its own accesses, and for those of the asynchronous proxy (bulk
// copies, wgmma) that it starts, which see writes of the generic proxy only behind a proxy fence.
struct Knowledge {
  Clock generic, proxy;
  void reset(std::size_t actors) {
    generic.reset(actors);
    proxy.reset(actors);
  }
  void join(const Knowledge& other) {
    generic.join(other.generic);
    proxy.join(other.proxy);
  }
};

}  // namespace winnow::simulator
