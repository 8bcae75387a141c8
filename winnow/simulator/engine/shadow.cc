#include "winnow/simulator/engine/shadow.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "winnow/simulator/engine.h"
#include "winnow/simulator/engine/report.h"

namespace winnow::simulator {

namespace {
constexpr std::size_t kLeastStamps = 1 << 18;  // fewer are not worth a look at all words
}

void Shadow::reset(const char* memory, std::uint32_t base, std::size_t bytes,
                   const std::vector<OperationRecord>* operations, unsigned threads) {
  memory_ = memory;
  base_ = base;
  bytes_ = bytes;
  threads_ = threads;
  operations_ = operations;
  words_.assign((bytes + 3) / 4, {});
  before_atomics_.clear();
  read_sets_.assign(1, {});
  added_.clear();
  stamps_ = 0;
  most_stamps_ = kLeastStamps;
  sites_.clear();
}

// Calls function(word, address, mask of its bytes).
template <class Function>
void Shadow::for_words(std::uint32_t address, std::size_t bytes, const Function& function) {
  const std::uint32_t begin = address - base_;
  const auto end = static_cast<std::uint32_t>(begin + bytes);
  for (std::uint32_t at = begin / 4 * 4; at < end; at += 4) {
    const std::uint32_t first = at < begin ? begin - at : 0;
    const std::uint32_t last = std::min<std::uint32_t>(4, end - at);
    const auto mask = static_cast<std::uint8_t>((0xf << first) & (0xf >> (4 - last)));
    function(words_[at / 4], base_ + at, mask);
  }
}

bool Shadow::is_ordered(Stamp earlier, const Access& access) const {
  if (earlier.none()) return true;
  const bool tensor = access.tensor != nullptr;
  if (earlier.is_operation()) {
    const OperationRecord& record = (*operations_)[earlier.operation()];
    // Lane 0 stands for the warp; the other lanes come while its operation is under way.
    const bool same_warp = tensor && record.thread == access.self;
    if (same_warp && (record.waited || !access.stamp.is_operation())) return true;
    earlier = record.stamp;
    if (earlier.none()) return false;
  }
  if (!tensor) return access.knowledge->generic.knows(earlier);
  return earlier.actor() == access.self || access.tensor->knows(earlier);
}

void Shadow::check_written(const Word& word, std::uint32_t address, const Access& access) const {
  if (!is_ordered(word.write, access)) report(word, word.write, true, address, access);
  const bool generic =
      !word.write.is_operation() && !word.write.none() && word.write.actor() < threads_;
  if (access.async_proxy && generic && !access.knowledge->proxy_of_shared.knows(word.write)) {
    const Site& site = sites_[word.site];
    fail("proxy fence",
         std::string(access.what) + " at " + std::to_string(address) +
             " uses what the generic proxy wrote there (" + site.what + ", " + line_of(site.where) +
             ", " + name_of(word.write) + ") without a proxy fence between them",
         access.where);
  }
}

void Shadow::check_reads(const Word& word, std::uint32_t address, const Access& access) const {
  for (const Stamp read : read_sets_[word.reads]) {
    if (!is_ordered(read, access)) report(word, read, false, address, access);
  }
}

void Shadow::read(std::uint32_t address, std::size_t bytes, const Access& access) {
  if (stamps_ >= most_stamps_) drop_unused_sets();
  Stamp checked;
  std::uint32_t from = ~0u, to = 0;
  for_words(address, bytes, [&](Word& word, std::uint32_t at, std::uint8_t mask) {
    if (word.write != checked && (word.mask & mask) != 0) {
      check_written(word, at, access);
      checked = word.write;
    }
    if (mask != 0xf) return;  // neighbours in a word are told apart for writes only
    if (word.reads != from) {
      from = word.reads;
      to = with_read(from, access.stamp);
    }
    word.reads = to;
  });
}

void Shadow::write(std::uint32_t address, std::size_t bytes, const Access& access) {
  Stamp checked;
  std::uint32_t checked_reads = 0;
  const std::uint32_t site = sites_.number_of({access.what, access.where});
  for_words(address, bytes, [&](Word& word, std::uint32_t at, std::uint8_t mask) {
    if (word.write != checked && (word.mask & mask) != 0) {
      check_written(word, at, access);
      checked = word.write;
    }
    if (word.reads != checked_reads) {
      check_reads(word, at, access);
      checked_reads = word.reads;
    }
    word = {access.stamp, site, 0, mask, false};
  });
}

std::string Shadow::unordered_rewrite(std::uint32_t address, std::size_t bytes,
                                      const Access& access) {
  std::string text;
  bool only_writes = true;
  for_words(address, bytes, [&](Word& word, std::uint32_t at, std::uint8_t mask) {
    if ((word.mask & mask) != 0 && !is_ordered(word.write, access)) {
      if (text.empty()) text = describe(word, word.write, true, at, access);
      if (word.write.is_operation() || word.write.actor() >= threads_) only_writes = false;
    }
    for (const Stamp read : read_sets_[word.reads]) {
      if (!is_ordered(read, access)) only_writes = false;
    }
  });
  return only_writes ? text : "";
}

void Shadow::overwrite(std::uint32_t address, std::size_t bytes, const Access& access) {
  const std::uint32_t site = sites_.number_of({access.what, access.where});
  for_words(address, bytes, [&](Word& word, std::uint32_t, std::uint8_t mask) {
    word = {access.stamp, site, 0, mask, false};
  });
}

void Shadow::atomic(std::uint32_t address, std::size_t bytes, const Access& access) {
  const std::uint32_t site = sites_.number_of({access.what, access.where});
  for_words(address, bytes, [&](Word& word, std::uint32_t at, std::uint8_t mask) {
    // One atomic operation needs no order behind another, but each behind the write before them.
    if (!word.atomic) before_atomics_[at] = word;
    check_written(before_atomics_[at], at, access);
    check_reads(word, at, access);
    word = {access.stamp, site, 0, mask, true};
  });
}

void Shadow::atomic_read(std::uint32_t address, std::size_t bytes, const Access& access) {
  for_words(address, bytes, [&](Word& word, std::uint32_t at, std::uint8_t) {
    if (!word.atomic) check_written(word, at, access);
  });
}

void Shadow::check_only(std::uint32_t address, std::size_t bytes, bool writes,
                        const Access& access) {
  for_words(address, bytes, [&](Word& word, std::uint32_t at, std::uint8_t) {
    check_written(word, at, access);
    if (writes) check_reads(word, at, access);
  });
}

// The set with one more stamp; a reader's later read stands for its earlier ones.
std::uint32_t Shadow::with_read(std::uint32_t set, Stamp stamp) {
  const auto [place, is_new] = added_.try_emplace({set, stamp}, 0);
  if (!is_new) return place->second;
  std::vector<Stamp> stamps = read_sets_[set];
  if (std::find(stamps.begin(), stamps.end(), stamp) != stamps.end()) {
    return place->second = set;
  }
  if (!stamp.is_operation()) {
    std::erase_if(stamps, [&](Stamp other) {
      return !other.is_operation() && other.actor() == stamp.actor();
    });
  }
  stamps.push_back(stamp);
  stamps_ += stamps.size();
  read_sets_.push_back(std::move(stamps));
  return place->second = static_cast<std::uint32_t>(read_sets_.size() - 1);
}

// Each reader of a word that many read makes a set of its own, which the next one replaces.
void Shadow::drop_unused_sets() {
  std::vector<std::vector<Stamp>> used(1);
  std::vector<std::uint32_t> number_in_use(read_sets_.size());
  stamps_ = 0;
  for (Word& word : words_) {
    if (word.reads == 0) continue;
    std::uint32_t& number = number_in_use[word.reads];
    if (number == 0) {
      number = static_cast<std::uint32_t>(used.size());
      used.push_back(std::move(read_sets_[word.reads]));
      stamps_ += used.back().size();
    }
    word.reads = number;
  }
  read_sets_ = std::move(used);
  added_.clear();
  most_stamps_ = std::max(kLeastStamps, 2 * stamps_);
}

std::string Shadow::name_of(Stamp stamp) const {
  if (!stamp.is_operation()) return name_of_actor(stamp.actor());
  const OperationRecord& record = (*operations_)[stamp.operation()];
  return std::string(record.what) + " of " + name_of_actor(record.thread) + ", " +
         line_of(record.where) + (record.stamp.none() ? ", for which nobody has waited" : "");
}

std::string Shadow::describe(const Word& word, Stamp earlier, bool earlier_wrote,
                             std::uint32_t address, const Access& access) const {
  std::string text = std::string(access.what) + " of " + memory_ + " at " +
                     std::to_string(address) + " is not ordered behind a " +
                     (earlier_wrote ? "write by " : "read by ") + name_of(earlier);
  if (earlier_wrote) {
    const Site& site = sites_[word.site];
    text += std::string(" (") + site.what + ", " + line_of(site.where) + ")";
  }
  return text;
}

void Shadow::report(const Word& word, Stamp earlier, bool earlier_wrote, std::uint32_t address,
                    const Access& access) const {
  fail("race", describe(word, earlier, earlier_wrote, address, access), access.where);
}

}  // namespace winnow::simulator
