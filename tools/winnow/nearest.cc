#include "tools/winnow/nearest.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace winnow::cli {
namespace {

// Levenshtein's distance.
std::size_t distance(const std::string& a, const std::string& b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

}  // namespace

std::string nearest(const std::string& word, std::span<const std::string> known) {
  std::string best;
  std::size_t least = 0;
  for (const std::string& candidate : known) {
    const bool begins =
        !word.empty() && (word.starts_with(candidate) || candidate.starts_with(word));
    const std::size_t difference = begins ? 0 : distance(word, candidate);
    if (2 * difference > candidate.size()) continue;
    if (best.empty() || difference < least) {
      best = candidate;
      least = difference;
    }
  }
  return best;
}

}  // namespace winnow::cli
