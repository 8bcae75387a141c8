// The choice that indexer::topk must make, by sorting. It shares no code with any backend.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace winnow::indexer::oracle {

struct Scored {
  std::int64_t row;
  double score;
};

// The `topk` best of the rows, which ascend, in ascending order. NaN ranks below everything.
inline std::vector<std::int64_t> choose(std::vector<Scored> rows, std::int64_t topk,
                                        bool later_ties) {
  if (later_ties) std::reverse(rows.begin(), rows.end());
  std::stable_sort(rows.begin(), rows.end(), [](const Scored& a, const Scored& b) {
    if (std::isnan(a.score)) return false;
    return std::isnan(b.score) || a.score > b.score;
  });
  rows.resize(std::min(rows.size(), static_cast<std::size_t>(topk)));
  std::vector<std::int64_t> chosen;
  for (const Scored& row : rows) chosen.push_back(row.row);
  std::sort(chosen.begin(), chosen.end());
  return chosen;
}

}  // namespace winnow::indexer::oracle
