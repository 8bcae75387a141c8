// The places in the source from which words were accessed, each of them once.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "winnow/simulator/plant.h"

namespace winnow::simulator {

struct Site {
  const char* what = "";
  Where where = {};
  bool operator==(const Site& other) const {
    return where.line() == other.where.line() && where.code() == other.where.code() &&
           what == other.what && where.file_name() == other.where.file_name();
  }
};

class Sites {
 public:
  void clear() { *this = {}; }
  // Not 0, which is that of no access.
  std::uint32_t number_of(const Site& site) {
    std::uint32_t& recent =
        recent_[(reinterpret_cast<std::uintptr_t>(site.where.code()) / 4 + site.where.line()) %
                recent_.size()];
    if (all_[recent] == site) return recent;
    const auto found = std::find(all_.begin(), all_.end(), site);
    recent = static_cast<std::uint32_t>(found - all_.begin());
    if (found == all_.end()) all_.push_back(site);
    return recent;
  }
  const Site& operator[](std::uint32_t number) const { return all_[number]; }

 private:
  std::vector<Site> all_ = std::vector<Site>(1);
  std::array<std::uint32_t, 256> recent_{};  // by a few bits of what tells them apart
};

}  // namespace winnow::simulator
