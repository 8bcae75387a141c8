#include "winnow/simulator/engine/writers.h"

#include <cstdint>
#include <map>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "winnow/simulator/engine/block.h"
#include "winnow/simulator/engine/grid.h"
#include "winnow/simulator/engine/report.h"

namespace winnow::simulator {
namespace {

struct Writer {
  std::int64_t launch = 0;
  unsigned block[3] = {}, thread = 0;
  const char* role = nullptr;  // of the thread's last wait for an mbarrier
  int what = 0;
  Where where = {};

  auto key() const {
    return std::tuple(launch, block[0], block[1], block[2], thread, role, what, where.line(),
                      where.code());
  }
};

// Words have the number of their writer; 0: nobody is known.
struct Notes {
  bool on = false;
  std::vector<Writer> writers{1};
  std::map<decltype(Writer().key()), std::uint32_t> numbers;
  std::unordered_map<std::uintptr_t, std::uint32_t> words;  // by address / 4
};
Notes& notes() {
  static Notes all;
  return all;
}

std::uintptr_t word_of(const void* address) {
  return reinterpret_cast<std::uintptr_t>(address) / 4;
}

// Calls function(word) for each word that holds some of the bytes.
template <class Function>
void for_words(const void* begin, std::size_t bytes, const Function& function) {
  if (bytes == 0) return;
  const std::uintptr_t last = word_of(static_cast<const char*>(begin) + bytes - 1);
  for (std::uintptr_t word = word_of(begin); word <= last; ++word) function(word);
}

}  // namespace

void note_writers(bool on) {
  notes() = {};
  notes().on = on;
}

bool notes_writers() { return notes().on; }

void note_write(const void* address, std::size_t bytes, const Where& where) {
  Notes& all = notes();
  if (!all.on || current == nullptr) return;
  const Writer writer{cluster->run->number, {block->index[0], block->index[1], block->index[2]},
                      current->number,      current->last_role,
                      current->last_what,   where};
  const auto [place, is_new] =
      all.numbers.try_emplace(writer.key(), static_cast<std::uint32_t>(all.writers.size()));
  if (is_new) all.writers.push_back(writer);
  for_words(address, bytes, [&](std::uintptr_t word) { all.words[word] = place->second; });
}

void forget_writers(const void* begin, std::size_t bytes) {
  Notes& all = notes();
  if (!all.on) return;
  for_words(begin, bytes, [&](std::uintptr_t word) { all.words.erase(word); });
}

void note_copy(const void* to, const void* from, std::size_t bytes) {
  Notes& all = notes();
  if (!all.on) return;
  const std::uintptr_t by = word_of(to) - word_of(from);
  for_words(from, bytes, [&](std::uintptr_t word) {
    const auto found = all.words.find(word);
    if (found == all.words.end()) {
      all.words.erase(word + by);
    } else {
      all.words[word + by] = found->second;
    }
  });
}

std::string describe_writer(const void* address) {
  const Notes& all = notes();
  const auto found = all.words.find(word_of(address));
  if (found == all.words.end()) return "was written by no kernel";
  const Writer& writer = all.writers[found->second];
  std::string text = "was last written by thread " + std::to_string(writer.thread) + " (warp " +
                     std::to_string(writer.thread / 32) + ") of block [" +
                     std::to_string(writer.block[0]) + ", " + std::to_string(writer.block[1]) +
                     ", " + std::to_string(writer.block[2]) + "] in " +
                     name_of_launch(writer.launch) + ", at " + line_of(writer.where);
  if (writer.role != nullptr) {
    text += ", whose last wait was as \"" + std::string(writer.role) + "\" " +
            std::to_string(writer.what);
  }
  return text;
}

}  // namespace winnow::simulator
