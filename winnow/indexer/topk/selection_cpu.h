// Top-k selection from a stream of scores on the CPU: a buffer of candidates whose keys reach a
// threshold, the bar, which rises whenever the buffer is full. Internal; compiled once per
// instruction set.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "winnow/indexer/score_cpu.h"

namespace winnow::indexer {

// An unsigned integer in the order of the scores; NaN is 0, the lowest. The score must not be -0.
inline std::uint32_t key_of(float score) {
  const auto bits = std::bit_cast<std::uint32_t>(score);
  if (std::isnan(score)) return 0;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
inline float score_of(std::uint32_t key) {
  if (key == 0) return std::numeric_limits<float>::quiet_NaN();
  return std::bit_cast<float>(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

struct Candidate {
  std::uint32_t key;
  std::int32_t row;
};

// Keeps the k best candidates of a stream whose rows ascend.
class Selection {
 public:
  Selection(std::int64_t k, bool later_ties)
      : k_(static_cast<std::size_t>(k)), later_ties_(later_ties) {
    candidates_.reserve(capacity(k));
  }
  static std::size_t capacity(std::int64_t k) {
    return static_cast<std::size_t>(k + std::max<std::int64_t>(k, kBlock));
  }

  void clear() {
    candidates_.clear();
    bar_ = 0;
  }
  // Adds the rows first + r for r in [begin, end), whose scores are scores[r].
  void offer(const float (&scores)[kBlock], std::int64_t first, std::int64_t begin,
             std::int64_t end) {
    if (candidates_.size() + kBlock > candidates_.capacity()) drop();
    for (std::int64_t r = begin; r < end; ++r) {
      const std::uint32_t key = key_of(scores[r]);
      if (key >= bar_) candidates_.push_back({key, static_cast<std::int32_t>(first + r)});
    }
  }
  // Adds the candidates of `other`, which was offered later rows of the stream.
  void take(Selection& other) {
    for (const Candidate& candidate : other.finish()) {
      if (candidates_.size() == candidates_.capacity()) drop();
      if (candidate.key >= bar_) candidates_.push_back(candidate);
    }
  }
  // The chosen candidates in ascending order of their rows.
  const std::vector<Candidate>& finish() {
    drop();
    std::sort(candidates_.begin(), candidates_.end(),
              [](const Candidate& a, const Candidate& b) { return a.row < b.row; });
    return candidates_;
  }

 private:
  void drop() {
    if (candidates_.size() <= k_) return;
    const auto last = candidates_.begin() + static_cast<std::ptrdiff_t>(k_) - 1;
    std::nth_element(candidates_.begin(), last, candidates_.end(),
                     [this](const Candidate& a, const Candidate& b) {
                       if (a.key != b.key) return a.key > b.key;
                       return later_ties_ ? a.row > b.row : a.row < b.row;
                     });
    // A later row with the score of the k-th best is a candidate only if later rows win ties.
    bar_ = last->key + (later_ties_ ? 0 : 1);
    candidates_.resize(k_);
  }

  std::size_t k_;
  bool later_ties_;
  std::uint32_t bar_ = 0;
  std::vector<Candidate> candidates_;
};

// Into how many parts the rows are cut where there are at least twice as many workers as groups of
// queries: parts of a group have selections of their own, merged in the order of the rows.
inline std::int64_t parts_of_rows(std::int64_t workers, std::int64_t groups, std::int64_t blocks) {
  return std::max<std::int64_t>(1, std::min(workers / groups, blocks));
}

}  // namespace winnow::indexer
