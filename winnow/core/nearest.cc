#include "winnow/core/nearest.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "winnow/core/error.h"

namespace winnow {
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

bool is_end_of(const std::string& part, const std::string& whole) {
  return !part.empty() && (whole.starts_with(part) || whole.ends_with(part));
}

}  // namespace

std::string suggestion(const std::string& given, std::span<const std::string> known) {
  const std::string* best = nullptr;
  std::size_t least = 0;
  if (given.size() > 200) return "";  // a word of nobody's, and a long one takes its time
  for (const std::string& candidate : known) {
    std::size_t difference = distance(given, candidate);
    bool near = 2 * difference <= candidate.size() || is_end_of(given, candidate) ||
                is_end_of(candidate, given);
    // An operation is also known by its name without the family.
    const std::size_t family = candidate.rfind("::");
    if (family != std::string::npos && given.find("::") == std::string::npos) {
      const std::size_t of_name = distance(given, candidate.substr(family + 2));
      if (2 * of_name <= candidate.size() - (family + 2)) {
        near = true;
        difference = std::min(difference, of_name);
      }
    }
    if (near && (best == nullptr || difference < least)) {
      best = &candidate;
      least = difference;
    }
  }
  return best == nullptr ? "" : "; did you mean " + *best + "?";
}

void refuse_name(const std::string& operation, const std::string& argument,
                 const std::string& given, std::span<const std::string> known) {
  std::string wanted;
  for (const std::string& word : known) wanted += (wanted.empty() ? "one of " : ", ") + word;
  throw Error(ErrorCode::invalid_argument, operation, argument, wanted,
              "\"" + given + "\"" + suggestion(given, known));
}

}  // namespace winnow
