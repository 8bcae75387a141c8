// Bugs that tests plant: the engine drops or alters the calls of wrappers at one source line of a
// kernel, which is compiled once and stays as it is.
#pragma once

#include <cstdint>
#include <source_location>
#include <string>

namespace winnow::simulator {

using Where = std::source_location;

struct Plant {
  enum class Action {
    none,
    drop,   // the call does nothing: a wait that returns at once, a fence that is missing, a store
    add,    // to the call's number: the count of mbarrier_init(), the bytes of an expectation, a
            // parity (modulo 2), an address, a descriptor, the groups that a wait leaves pending
    delay,  // the call takes place after the thread's next arrival at a barrier
  };
  std::string file;  // the end of the path
  std::string text;  // occurs in exactly one line of it
  Action action = Action::none;
  std::int64_t addend = 0;
  int below = 0;  // the call begins this many lines below that line
  // Only calls of threads [first_thread, end_thread).
  unsigned first_thread = 0, end_thread = ~0u;
  // Of accesses to blocks of the cluster only those to ranks from this one on.
  unsigned first_rank = 0;
  unsigned line = 0;  // plant() finds it
};

// Plants one bug at a time. Throws std::invalid_argument unless `text` occurs in exactly one line
// of the file, which is looked for below `root`.
void plant(Plant bug, const std::string& root);
void unplant();
// How often the planted bug has taken effect since it was planted.
std::int64_t plant_hits();

namespace detail {
inline bool any_planted = false;
bool is_planted(const Where& where, Plant::Action action, unsigned rank = ~0u);
std::int64_t planted_addend();
}  // namespace detail

// For host halves: whether the call at this line is to be left out, or to be made later. `rank`: of
// the block that it names.
inline bool is_dropped(const Where& where, unsigned rank = ~0u) {
  return detail::any_planted && detail::is_planted(where, Plant::Action::drop, rank);
}
inline bool is_delayed(const Where& where) {
  return detail::any_planted && detail::is_planted(where, Plant::Action::delay);
}
// The number that the call is to use.
template <class T>
T altered(T value, const Where& where) {
  if (!detail::any_planted || !detail::is_planted(where, Plant::Action::add)) return value;
  return static_cast<T>(value + static_cast<T>(detail::planted_addend()));
}

}  // namespace winnow::simulator
