#include "winnow/simulator/plant.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "winnow/simulator/engine.h"
#include "winnow/simulator/engine/block.h"
#include "winnow/simulator/engine/grid.h"
#include "winnow/simulator/engine/report.h"

namespace winnow::simulator {
namespace {

Plant planted;
std::int64_t hits = 0;
std::set<const void*> kernels;  // in which it has taken effect

void note_hit(const void* kernel) {
  ++hits;
  kernels.insert(kernel);
}

bool ends_with(const char* text, const std::string& end) {
  const std::size_t length = std::strlen(text);
  return length >= end.size() && end.compare(text + length - end.size()) == 0;
}

bool alters_stores(const Plant& bug) {
  return bug.action == Plant::Action::undo || bug.action == Plant::Action::move;
}

bool is_planted_kernel(const void* kernel) {
  const std::string& text = planted.text;
  const std::size_t end = text.find('('), begin = text.find_last_of(" *&", end) + 1;
  return name_of_kernel(kernel) == text.substr(begin, end - begin);
}

// Counts it if so.
bool is_of_planted_thread() {
  const unsigned thread = thread_number();
  if (thread < planted.first_thread || thread >= planted.end_thread) return false;
  const void* const kernel = cluster->run->function;
  if (!planted.kernel.empty() && name_of_kernel(kernel) != planted.kernel) return false;
  note_hit(kernel);
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
  const bool of_store = alters_stores(bug), of_load = bug.action == Plant::Action::misread;
  const auto begins = [&] {
    if (line < 0 || line >= std::ssize(lines)) return false;
    const auto at = lines.begin() + line;
    if (of_load || at->find(of_store ? '=' : '(') != std::string::npos) return true;
    // Of what is made by a call, the compiler notes the line of that.
    return of_store && line > 0 && std::prev(at)->ends_with(" =");
  };
  if (!begins()) {
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

bool is_planted_access(const void* code, bool stores) {
  if (stores ? !alters_stores(planted) : planted.action != Plant::Action::misread) return false;
  const std::string line = line_of_code(code);  // of a file without its path
  return ("/" + planted.file + ":" + std::to_string(planted.line)).ends_with("/" + line) &&
         is_of_planted_thread();
}

std::int64_t planted_addend() { return planted.addend; }

unsigned planted_shift(const void* kernel, Plant::Action action) {
  if (planted.action != action || !is_planted_kernel(kernel)) return 0;
  return is_of_planted_thread() ? static_cast<unsigned>(planted.addend) : 0;
}

void alter_argument(int number, void* argument, std::size_t bytes) {
  if (planted.action != Plant::Action::launch_argument || planted.argument.number != number ||
      !is_planted_kernel(noted_kernel())) {
    return;
  }
  note_hit(noted_kernel());
  std::int64_t value = 0;
  if (planted.argument.bytes != 0) bytes = planted.argument.bytes;
  bytes = std::min(bytes, sizeof(value));
  auto* const at = static_cast<std::byte*>(argument) + planted.argument.offset;
  std::memcpy(&value, at, bytes);
  value += planted.addend;
  std::memcpy(at, &value, bytes);
}

}  // namespace detail

void alter_launch(const void* kernel, Grid& grid, const void*& stream) {
  const bool blocks = planted.action == Plant::Action::launch_blocks,
             threads = planted.action == Plant::Action::launch_threads,
             astray = planted.action == Plant::Action::launch_astray;
  if ((!blocks && !threads && !astray) || !is_planted_kernel(kernel)) return;
  note_hit(kernel);
  if (blocks) grid.grid[0] += static_cast<unsigned>(planted.addend);
  if (threads) grid.block[0] += static_cast<unsigned>(planted.addend);
  if (astray) stream = kernel;  // any address names one
}

void plant(Plant bug, const std::string& root) {
  bug.line = line_of_plant(bug, root);
  planted = std::move(bug);
  hits = 0;
  kernels.clear();
  detail::any_planted = planted.action != Plant::Action::none;
}

void unplant() {
  planted = {};
  detail::any_planted = false;
}

std::int64_t plant_hits() { return hits; }
const std::set<const void*>& planted_kernels() { return kernels; }

}  // namespace winnow::simulator
