#include "winnow/core/foreign_dtype.h"

#include <algorithm>
#include <cstddef>
#include <mutex>
#include <vector>

namespace winnow {
namespace {

constexpr std::size_t kFirst = 128, kMost = 256 - kFirst;

// Kept for the life of the process: an Error may be told while it ends.
struct Names {
  std::mutex mutex;
  std::vector<std::string> known;
};
Names& names() {
  static auto& names = *new Names();
  return names;
}

}  // namespace

DType foreign_dtype(std::string_view name) {
  Names& all = names();
  const std::lock_guard locked(all.mutex);
  auto found = std::find(all.known.begin(), all.known.end(), name);
  if (found == all.known.end()) {
    // A program has few of them; the last value takes the name of whatever comes beyond.
    if (all.known.size() == kMost) {
      *--found = name;
    } else {
      found = all.known.emplace(found, name);
    }
  }
  return static_cast<DType>(kFirst + static_cast<std::size_t>(found - all.known.begin()));
}

bool is_foreign(DType dtype) { return static_cast<std::size_t>(dtype) >= kFirst; }

std::string name_of(DType dtype) {
  if (!is_foreign(dtype)) return std::string(to_string(dtype));
  Names& all = names();
  const std::lock_guard locked(all.mutex);
  return all.known.at(static_cast<std::size_t>(dtype) - kFirst);
}

}  // namespace winnow
