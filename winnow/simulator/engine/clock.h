// Who knows of whose actions: vector clocks.
//
// Actors are the threads of a cluster, its warps as far as their matrix products go, and the phases
// of its mbarriers. An action of an actor has a stamp: the actor and its count at the time.
// A thread knows of the action if its clock holds that count of the actor, or a higher one: then
// the action has happened before what the thread does from then on, whatever the schedule.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
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

// Counts that many clocks share: behind a barrier all threads know the same. They are changed only
// where one clock has them.
struct Counts {
  std::uint64_t version;
  std::vector<std::int32_t> values;
  // Some versions that hold no higher counts, so that nobody compares them again.
  std::array<std::uint64_t, 8> covered{};
  std::size_t next = 0;

  explicit Counts(std::size_t actors) : version(new_version()), values(actors) {}
  Counts(const Counts& other) : Counts(other, new_version()) { cover(other.version); }

  static std::uint64_t new_version() {
    static std::uint64_t last = 0;
    return ++last;
  }
  bool covers(std::uint64_t other) const {
    return std::find(covered.begin(), covered.end(), other) != covered.end();
  }
  void cover(std::uint64_t other) { covered[next++ % covered.size()] = other; }

 private:
  Counts(const Counts& other, std::uint64_t its_version)
      : version(its_version), values(other.values), covered(other.covered), next(other.next) {}
};

class Clock {
 public:
  // `own`: whose clock it is, if it is a thread's; its own count stands apart from the others.
  static constexpr Actor kNobody = ~Actor{0};
  void reset(std::size_t actors, Actor own = kNobody) {
    static std::shared_ptr<Counts> zeros;
    if (!zeros || zeros->values.size() != actors) zeros = std::make_shared<Counts>(actors);
    counts_ = zeros;
    own_ = own;
    own_count_ = 0;
  }
  std::int32_t operator[](Actor actor) const {
    return actor == own_ ? own_count_ : counts_->values[actor];
  }
  bool knows(Stamp stamp) const { return (*this)[stamp.actor()] >= stamp.count(); }
  void advance() { ++own_count_; }
  void raise(Actor actor, std::int32_t count) {
    if (actor == own_) {
      own_count_ = std::max(own_count_, count);
    } else if (counts_->values[actor] < count) {
      change();
      counts_->values[actor] = count;
    }
  }
  void join(const Clock& other) {
    join_counts(other.counts_);
    if (own_ != kNobody) own_count_ = std::max(own_count_, other[own_]);
    if (other.own_ != kNobody) raise(other.own_, other.own_count_);
  }

 private:
  void change() {
    if (counts_.use_count() > 1) {
      counts_ = std::make_shared<Counts>(*counts_);
    } else {
      counts_->version = Counts::new_version();
    }
  }
  void join_counts(const std::shared_ptr<Counts>& others) {
    if (counts_ == others || counts_->covers(others->version)) return;
    if (!others->covers(counts_->version)) {
      const std::int32_t* const mine = counts_->values.data();
      const std::int32_t* const theirs = others->values.data();
      const std::size_t size = counts_->values.size();
      std::int32_t less = 0, more = 0;
      for (std::size_t i = 0; i < size; ++i) {
        less |= mine[i] < theirs[i];
        more |= mine[i] > theirs[i];
      }
      if (less == 0) return counts_->cover(others->version);
      if (more != 0) {
        change();
        std::int32_t* const to = counts_->values.data();
        for (std::size_t i = 0; i < size; ++i) to[i] = std::max(to[i], theirs[i]);
        return counts_->cover(others->version);
      }
      others->cover(counts_->version);
    }
    counts_ = others;
  }

  std::shared_ptr<Counts> counts_;
  Actor own_ = kNobody;
  std::int32_t own_count_ = 0;
};

// What a thread knows of: for its own accesses, and for those of the asynchronous proxy (bulk
// copies, wgmma) that it starts, which see writes of the generic proxy only behind a proxy fence.
struct Knowledge {
  Clock generic, proxy;
  void reset(std::size_t actors, Actor own = Clock::kNobody) {
    generic.reset(actors, own);
    proxy.reset(actors, own);
  }
  void join(const Knowledge& other) {
    generic.join(other.generic);
    proxy.join(other.proxy);
  }
};

}  // namespace winnow::simulator
