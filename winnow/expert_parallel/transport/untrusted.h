// What another process says, in memory that this one reads or in a store: it is read once, and it
// has bounds. Internal.
#pragma once

#include <algorithm>
#include <atomic>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "winnow/core/error.h"
#include "winnow/core/export.h"
#include "winnow/core/read_once.h"

namespace winnow::expert_parallel {

// Who has written, and what errors call it: "dispatch: the counts of rank 2: tokens: want ...".
struct Sender {
  std::string_view operation;  // "expert_parallel::dispatch"
  std::string_view phase;      // "the counts"
  int rank = -1;
};

// Throws Error (internal), which breaks the layer on all ranks (Communicator::call): what was
// written is nothing that a rank writes.
[[noreturn]] WINNOW_EXPORT void refuse_untrusted(const Sender& by, std::string_view what,
                                                 const std::string& want, const std::string& got);
[[noreturn]] WINNOW_EXPORT void refuse_out_of_bounds(const Sender& by, std::string_view what,
                                                     std::int64_t least, std::int64_t most,
                                                     std::int64_t got);

// The bounds of a number: what it is called, the least and the most that it may be. A struct has a
// function of this name beside it, which looks at all of its numbers.
template <std::integral Number>
void check_bounds(Number value, const Sender& by, std::string_view what, std::int64_t least,
                  std::int64_t most) {
  if (std::cmp_less(value, least) || std::cmp_greater(value, most)) {
    refuse_out_of_bounds(by, what, least, most, static_cast<std::int64_t>(value));
  }
}

// A value in memory that another process may write at any time, perhaps wrongly: a rank that is
// broken, or a program that is not a rank. Everything that is read from such memory is one of
// these, except words that are only waited for and rows that are only copied.
template <class Value>
class Untrusted {
  static_assert(std::is_trivially_copyable_v<Value>);

 public:
  void write(const Value& value) { value_ = value; }

  // A copy of the value, which nobody else can change. Throws Error (internal) if it is outside of
  // the bounds that check_bounds() is given.
  template <class... Bounds>
  Value read(const Sender& by, const Bounds&... bounds) const {
    Value received;
    if constexpr (std::is_integral_v<Value>) {
      received = read_once(&value_);
    } else {
      std::memcpy(&received, &value_, sizeof(received));
      std::atomic_signal_fence(std::memory_order_seq_cst);  // no part of it is read again
    }
    check_bounds(received, by, bounds...);
    return received;
  }

 private:
  Value value_;
};

template <class Value>
Untrusted<Value>* untrusted_at(std::byte* memory, std::int64_t offset) {
  return reinterpret_cast<Untrusted<Value>*>(memory + offset);
}

// The bytes as text in UTF-8, with a "?" for every byte that is no part of such text.
WINNOW_EXPORT std::string printable(std::string_view bytes);

// The beginning of the bytes, at most 80 of them, as such a text in quotation marks, for errors.
std::string quoted(std::string_view bytes);

// The text that was written there, which need not end with a NUL.
template <std::size_t kBytes>
std::string untrusted_text(const char (&message)[kBytes]) {
  char text[kBytes];
  std::memcpy(text, message, kBytes);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  return printable({text, static_cast<std::size_t>(std::find(text, text + kBytes, '\0') - text)});
}

// The number that a text is which comes from a store. Throws Error (internal) for any other text,
// and outside of its bounds. Numbers are read from texts in this way alone: a test looks for others
// (cmake/check_kernels.cmake).
WINNOW_EXPORT std::int64_t untrusted_number(std::string_view text, const Sender& by,
                                            std::string_view what, std::int64_t least,
                                            std::int64_t most);

inline constexpr ErrorReason kLastReason = ErrorReason::interrupted;

// A refusal in such memory: the code of an Error plus 1; 0 stands for none.
inline constexpr std::uint32_t kMostRefusal = static_cast<std::uint32_t>(ErrorCode::internal) + 1;
inline std::uint32_t refusal_of(ErrorCode code) { return static_cast<std::uint32_t>(code) + 1; }
inline ErrorCode code_of(std::uint32_t refusal) {
  return refusal == 0 || refusal > kMostRefusal ? ErrorCode::internal
                                                : static_cast<ErrorCode>(refusal - 1);
}

}  // namespace winnow::expert_parallel
