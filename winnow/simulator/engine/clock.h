// Who knows of whose actions: vector clocks.
//
// Actors are the threads of a cluster, its warps as far as their matrix products go, and the phases
// of its mbarriers. An action of an actor has a stamp: the actor and its count at the time.
// A thread knows of the action if its clock holds that count of the actor, or a higher one: then
// the action has happened before what the thread does from then on, whatever the schedule.
// Of other clusters a thread knows what words of global memory have told it (Others).
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
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

// What many clocks share and is changed only where one has it. It only ever grows.
struct Versioned {
  std::uint64_t version = new_version();
  // Some versions that hold no more, so that nobody compares them again.
  std::array<std::uint64_t, 8> covered{};
  std::size_t next = 0;

  Versioned() = default;
  Versioned(const Versioned& other) : covered(other.covered), next(other.next) {
    cover(other.version);
  }

  static std::uint64_t new_version() {
    static std::uint64_t last = 0;
    return ++last;
  }
  void renew() { version = new_version(); }
  bool covers(std::uint64_t other) const {
    return std::find(covered.begin(), covered.end(), other) != covered.end();
  }
  void cover(std::uint64_t other) { covered[next++ % covered.size()] = other; }
};

// Counts of actors: behind a barrier all threads know the same.
struct Counts : Versioned {
  std::vector<std::int32_t> values;

  explicit Counts(std::size_t actors) : values(actors) {}
};

class Clock;

// What is known of other clusters: a clock of each that something is known of. Clocks that have
// learned the same share it.
class Others {
 public:
  void join(const Others& other);
  void join(std::uint32_t cluster, const Clock& clock);
  // Null: nothing is known.
  const Clock* find(std::uint32_t cluster) const;
  // Whether function(cluster, clock) is true of one.
  template <class Function>
  bool any(const Function& function) const;

 private:
  struct Clocks;
  // Whether `all` knows of all that `some` does.
  static bool includes(const Clocks& all, const Clocks& some);
  // Those that nobody shares, to be changed.
  Clocks& change();
  std::shared_ptr<Clocks> clocks_;  // null: none. They know of no others themselves.
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
    others_ = {};
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
    others_.join(other.others_);
    join_counts(other.counts_);
    if (own_ != kNobody) own_count_ = std::max(own_count_, other[own_]);
    if (other.own_ != kNobody) raise(other.own_, other.own_count_);
  }
  // Whether join() would change nothing, others apart.
  bool includes(const Clock& other) const {
    if (other.own_ != kNobody && (*this)[other.own_] < other.own_count_) return false;
    if (counts_ == other.counts_ || counts_->covers(other.counts_->version)) return true;
    for (std::size_t i = 0; i < counts_->values.size(); ++i) {
      const std::int32_t theirs = other.counts_->values[i];
      if (counts_->values[i] < theirs && (*this)[static_cast<Actor>(i)] < theirs) return false;
    }
    return true;
  }
  const Others& others() const { return others_; }
  // What others are told by a thread of the cluster; and what is told to one of it.
  void tell(std::uint32_t cluster, Others& to) const {
    to.join(others_);
    Clock alone = *this;
    alone.others_ = {};
    to.join(cluster, alone);
  }
  void hear(std::uint32_t cluster, const Others& from) {
    others_.join(from);
    if (const Clock* own = from.find(cluster)) join(*own);
  }

 private:
  void change() {
    if (counts_.use_count() > 1) {
      counts_ = std::make_shared<Counts>(*counts_);
    } else {
      counts_->renew();
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
  Others others_;
};

// In the order of the clusters.
struct Others::Clocks : Versioned {
  std::vector<std::pair<std::uint32_t, Clock>> list;

  auto from(std::uint32_t cluster) const {
    return std::lower_bound(
        list.begin(), list.end(), cluster,
        [](const auto& one, std::uint32_t number) { return one.first < number; });
  }
  void join(std::uint32_t cluster, const Clock& clock) {
    const auto place = list.begin() + (from(cluster) - list.cbegin());
    if (place != list.end() && place->first == cluster) {
      place->second.join(clock);
    } else {
      list.emplace(place, cluster, clock);
    }
  }
};

inline const Clock* Others::find(std::uint32_t cluster) const {
  if (!clocks_) return nullptr;
  const auto found = clocks_->from(cluster);
  return found == clocks_->list.end() || found->first != cluster ? nullptr : &found->second;
}
template <class Function>
bool Others::any(const Function& function) const {
  return clocks_ && std::any_of(clocks_->list.begin(), clocks_->list.end(),
                                [&](const auto& one) { return function(one.first, one.second); });
}
inline bool Others::includes(const Clocks& all, const Clocks& some) {
  auto known = all.list.begin();
  for (const auto& [cluster, clock] : some.list) {
    while (known != all.list.end() && known->first < cluster) ++known;
    if (known == all.list.end() || known->first != cluster || !known->second.includes(clock)) {
      return false;
    }
  }
  return true;
}
inline Others::Clocks& Others::change() {
  if (!clocks_) {
    clocks_ = std::make_shared<Clocks>();
  } else if (clocks_.use_count() > 1) {
    clocks_ = std::make_shared<Clocks>(*clocks_);
  } else {
    clocks_->renew();
  }
  return *clocks_;
}
inline void Others::join(std::uint32_t cluster, const Clock& clock) {
  const Clock* const known = find(cluster);
  if (known == nullptr || !known->includes(clock)) change().join(cluster, clock);
}
inline void Others::join(const Others& other) {
  if (clocks_ == other.clocks_ || !other.clocks_) return;
  if (clocks_) {
    Clocks& theirs = *other.clocks_;
    if (clocks_->covers(theirs.version)) return;
    if (!theirs.covers(clocks_->version)) {
      if (includes(*clocks_, theirs)) return clocks_->cover(theirs.version);
      if (!includes(theirs, *clocks_)) {
        Clocks& changed = change();
        for (const auto& [number, clock] : theirs.list) changed.join(number, clock);
        return changed.cover(theirs.version);
      }
      theirs.cover(clocks_->version);
    }
  }
  clocks_ = other.clocks_;
}

// What a word tells of clusters: see Knowledge.
struct Told {
  Others generic, proxy_of_shared, proxy_of_global;
  void join(const Told& other) {
    generic.join(other.generic);
    proxy_of_shared.join(other.proxy_of_shared);
    proxy_of_global.join(other.proxy_of_global);
  }
};
// What words have told kernels that have ended is visible to both proxies.
inline Told told_to_kernels(const Others& told) { return {told, told, told}; }

// What a thread knows of: for its own accesses, and for those of the asynchronous proxy (bulk
// copies, wgmma) that it starts, which see writes of the generic proxy only behind a proxy fence of
// the memory that they are in.
struct Knowledge {
  Clock generic, proxy_of_shared, proxy_of_global;
  void reset(std::size_t actors, Actor own = Clock::kNobody) {
    generic.reset(actors, own);
    proxy_of_shared.reset(actors, own);
    proxy_of_global.reset(actors, own);
  }
  void join(const Knowledge& other) {
    generic.join(other.generic);
    proxy_of_shared.join(other.proxy_of_shared);
    proxy_of_global.join(other.proxy_of_global);
  }
  // What others are told by a thread of the cluster; and what is told to one of it.
  void tell(std::uint32_t cluster, Told& to) const {
    generic.tell(cluster, to.generic);
    proxy_of_shared.tell(cluster, to.proxy_of_shared);
    proxy_of_global.tell(cluster, to.proxy_of_global);
  }
  void hear(std::uint32_t cluster, const Told& from) {
    generic.hear(cluster, from.generic);
    proxy_of_shared.hear(cluster, from.proxy_of_shared);
    proxy_of_global.hear(cluster, from.proxy_of_global);
  }
};

}  // namespace winnow::simulator
