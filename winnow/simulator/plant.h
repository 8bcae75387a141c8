// Bugs that tests plant: the engine drops or alters the calls of wrappers, or undoes or moves the
// plain stores and loads, at one source line of a kernel, which is compiled once and stays as it
// is; or it alters the launches of a kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <source_location>
#include <string>

namespace winnow::simulator {

// Of its own, so that arguments of this type find no function of the engine where a wrapper of the
// same name is meant.
namespace source {

// A source line; or, of an access through a pointer, the code that makes it.
class Where {
 public:
  constexpr Where() = default;
  constexpr Where(const std::source_location& at)
      : file_(at.file_name()), function_(at.function_name()), line_(at.line()) {}
  // Of the caller, as the default argument of a function.
  static constexpr Where current(const std::source_location& at = std::source_location::current()) {
    return at;
  }
  static Where of_code(const void* code) {
    Where where;
    where.code_ = code;
    return where;
  }
  constexpr const char* file_name() const { return file_; }
  constexpr const char* function_name() const { return function_; }
  constexpr unsigned line() const { return line_; }  // 0: not known
  constexpr const void* code() const { return code_; }

 private:
  const char* file_ = "";
  const char* function_ = "";
  unsigned line_ = 0;
  const void* code_ = nullptr;
};

}  // namespace source

using source::Where;

struct Plant {
  enum class Action {
    none,
    drop,   // the call does nothing: a wait that returns at once, a fence that is missing, a store;
            // a shuffle or a vote gives the lane's own value
    add,    // to the call's number: the count of mbarrier_init(), the bytes of an expectation, a
            // parity (modulo 2), an address, a descriptor, the groups that a wait leaves pending,
            // the lane of a shuffle, what an atomicAdd() adds
    delay,  // the call takes place after the thread's next arrival at a barrier
    weaken,   // a strong store tells nothing and a strong load hears nothing, fences or not; an
              // atomic operation is a plain load and store
    undo,     // a plain store, through a pointer: what was there before comes back
    move,     // such a store takes place `addend` bytes further on
    misread,  // a plain load, through a pointer, reads what stands so many bytes further on
    // Of the kernel whose name stands in the text before a parenthesis: its threads find `addend`
    // more in threadIdx.x, blockIdx.x or gridDim.x.
    shift_thread,
    shift_block,
    shift_grid,
    // Of its launches: so many more blocks or threads along x; more in `argument`, in bytes if that
    // is a pointer; and a stream of its own, which nothing waits for.
    launch_blocks,
    launch_threads,
    launch_argument,
    launch_astray,
  };
  std::string file;  // the end of the path
  std::string text;  // occurs in exactly one line of it
  Action action = Action::none;
  std::int64_t addend = 0;
  int below = 0;  // the call begins this many lines below that line
  // Only calls and stores of threads [first_thread, end_thread).
  unsigned first_thread = 0, end_thread = ~0u;
  // Of accesses to blocks of the cluster only those to ranks from this one on.
  unsigned first_rank = 0;
  std::string kernel = {};  // only in the kernel of this name; empty: in all that share the line
  // Which argument of the launch, or what member of it: so many bytes, so far from its begin.
  struct Argument {
    int number = 0;
    std::size_t offset = 0, bytes = 0;  // 0: all of it
  } argument = {};
  unsigned line = 0;  // plant() finds it
};

// Plants one bug at a time. Throws std::invalid_argument unless `text` occurs in exactly one line
// of the file, which is looked for below `root`.
void plant(Plant bug, const std::string& root);
// The line at which it would: the same, and throws if no call or store can begin there.
unsigned line_of_plant(const Plant& bug, const std::string& root);
void unplant();
// How often the planted bug has taken effect since it was planted, and in which kernels.
std::int64_t plant_hits();
const std::set<const void*>& planted_kernels();
// For `make simulate`, which wants to know how many bugs of each kernel are found.
void note_found(const std::string& bug);

namespace detail {
inline bool any_planted = false;
bool is_planted(const Where& where, Plant::Action action, unsigned rank = ~0u);
// Whether the running thread's plain store by this code is to be undone or moved, or its load is to
// read something else.
bool is_planted_access(const void* code, bool stores);
std::int64_t planted_addend();
// What the running thread finds too much in an index that the action alters.
unsigned planted_shift(const void* kernel, Plant::Action action);
// Of the kernel that is launched next.
void alter_argument(int number, void* argument, std::size_t bytes);
}  // namespace detail

// For host halves: whether the call at this line is to be left out, or to be made later. `rank`: of
// the block that it names.
inline bool is_dropped(const Where& where, unsigned rank = ~0u) {
  return detail::any_planted && detail::is_planted(where, Plant::Action::drop, rank);
}
inline bool is_delayed(const Where& where) {
  return detail::any_planted && detail::is_planted(where, Plant::Action::delay);
}
inline bool is_weakened(const Where& where) {
  return detail::any_planted && detail::is_planted(where, Plant::Action::weaken);
}
// The number that the call is to use.
template <class T>
T altered(T value, const Where& where) {
  if (!detail::any_planted || !detail::is_planted(where, Plant::Action::add)) return value;
  return static_cast<T>(value + static_cast<T>(detail::planted_addend()));
}
// The address, so many bytes further on.
template <class T>
const T* altered(const T* address, const Where& where) {
  return reinterpret_cast<const T*>(altered(reinterpret_cast<std::uintptr_t>(address), where));
}

}  // namespace winnow::simulator
