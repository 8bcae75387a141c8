#include "winnow/simulator/plant.h"

#include <cstring>
#include <filesystem>
#include <fstream>
#include <stdexcept>

#include "winnow/simulator/engine.h"

namespace winnow::simulator {
namespace {

Plant planted;
std::int64_t hits = 0;

bool ends_with(const char* text, const std::string& end) {
  const std::size_t length = std::strlen(text);
  return length >= end.size() && end.compare(text + length - end.size()) == 0;
}

// The number of the line that holds the text; throws unless exactly one line does. If several files
// below `root` end in `file`, it looks at the last one found.
unsigned line_with(const std::string& root, const std::string& file, const std::string& text) {
  std::filesystem::path path;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(root)) {
    if (ends_with(entry.path().c_str(), "/" + file)) path = entry.path();
  }
  std::ifstream in(path);
  if (path.empty() || !in) throw std::invalid_argument("plant: there is no file " + file);
  unsigned found = 0, number = 0;
  for (std::string line; std::getline(in, line);) {
    ++number;
    if (line.find(text) == std::string::npos) continue;
    if (found != 0)
      throw std::invalid_argument("plant: several lines of " + file + " hold " + text);
    found = number;
  }
  if (found == 0) throw std::invalid_argument("plant: no line of " + file + " holds " + text);
  return found;
}

}  // namespace

namespace detail {

bool is_planted(const Where& where, Plant::Action action, unsigned rank) {
  if (planted.action != action || planted.line != where.line() || rank < planted.first_rank ||
      !ends_with(where.file_name(), planted.file)) {
    return false;
  }
  const unsigned thread = thread_number();
  if (thread < planted.first_thread || thread >= planted.end_thread) return false;
  ++hits;
  return true;
}

std::int64_t planted_addend() { return planted.addend; }

}  // namespace detail

void plant(Plant bug, const std::string& root) {
  bug.line = line_with(root, bug.file, bug.text) + static_cast<unsigned>(bug.below);
  planted = std::move(bug);
  hits = 0;
  detail::any_planted = planted.action != Plant::Action::none;
}

void unplant() {
  planted = {};
  detail::any_planted = false;
}

std::int64_t plant_hits() { return hits; }

}  // namespace winnow::simulator
