#include "winnow/simulator/plant.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "winnow/simulator/engine.h"
#include "winnow/simulator/engine/report.h"

namespace winnow::simulator {
namespace {

Plant planted;
std::int64_t hits = 0;

bool ends_with(const char* text, const std::string& end) {
  const std::size_t length = std::strlen(text);
  return length >= end.size() && end.compare(text + length - end.size()) == 0;
}

bool alters_stores(const Plant& bug) {
  return bug.action == Plant::Action::undo || bug.action == Plant::Action::move;
}

// Counts it if so.
bool is_of_planted_thread() {
  const unsigned thread = thread_number();
  if (thread < planted.first_thread || thread >= planted.end_thread) return false;
  ++hits;
  return true;
}

// The lines of the file below `root` whose path ends in `file`; if there are several, of the last
// one found. Beside `root` it is found by its path.
const std::vector<std::string>& lines_of(const std::string& root, const std::string& file) {
  static std::map<std::string, std::vector<std::string>> known;
  std::vector<std::string>& lines = known[file];
  if (!lines.empty()) return lines;
  std::filesystem::path path = std::filesystem::path(root).parent_path() / file;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(root)) {
    if (ends_with(entry.path().c_str(), "/" + file)) path = entry.path();
  }
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  if (lines.empty()) throw std::invalid_argument("plant: there is no file " + file);
  return lines;
}

}  // namespace

unsigned line_of_plant(const Plant& bug, const std::string& root) {
  const std::vector<std::string>& lines = lines_of(root, bug.file);
  const auto holds = [&](const std::string& line) {
    return line.find(bug.text) != std::string::npos;
  };
  const auto found = std::find_if(lines.begin(), lines.end(), holds);
  const std::string named = bug.file + " holds " + bug.text;
  if (found == lines.end()) throw std::invalid_argument("plant: no line of " + named);
  if (std::any_of(found + 1, lines.end(), holds)) {
    throw std::invalid_argument("plant: several lines of " + named);
  }
  const auto line = found - lines.begin() + bug.below;
  const bool exists = line >= 0 && line < std::ssize(lines);
  const bool of_store = alters_stores(bug);
  if (!exists ||
      lines[static_cast<std::size_t>(line)].find(of_store ? '=' : '(') == std::string::npos) {
    throw std::invalid_argument(std::string("plant: no ") + (of_store ? "store" : "call") +
                                " begins " + std::to_string(bug.below) +
                                " lines below the line of " + named);
  }
  return static_cast<unsigned>(line + 1);
}

namespace detail {

bool is_planted(const Where& where, Plant::Action action, unsigned rank) {
  if (planted.action != action || planted.line != where.line() || rank < planted.first_rank ||
      !ends_with(where.file_name(), planted.file)) {
    return false;
  }
  return is_of_planted_thread();
}

bool is_planted_store(const void* code) {
  if (!alters_stores(planted)) return false;
  const std::string line = line_of_code(code);  // of a file without its path
  return ("/" + planted.file + ":" + std::to_string(planted.line)).ends_with("/" + line) &&
         is_of_planted_thread();
}

std::int64_t planted_addend() { return planted.addend; }

unsigned planted_shift(const void* kernel, Plant::Action action) {
  if (planted.action != action) return 0;
  const std::string& text = planted.text;
  const std::size_t end = text.find('('), begin = text.find_last_of(" *&", end) + 1;
  if (name_of_kernel(kernel) != text.substr(begin, end - begin)) return 0;
  return is_of_planted_thread() ? static_cast<unsigned>(planted.addend) : 0;
}

}  // namespace detail

void plant(Plant bug, const std::string& root) {
  bug.line = line_of_plant(bug, root);
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
