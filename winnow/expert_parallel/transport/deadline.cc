#include "winnow/expert_parallel/transport/deadline.h"

#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "winnow/core/error.h"

namespace winnow::expert_parallel {
namespace {

using std::chrono::nanoseconds;

constexpr nanoseconds kDefault = std::chrono::seconds(30);
// Far from where begin_ + timeout overflows.
constexpr nanoseconds kLongest = std::chrono::hours(24 * 365);

}  // namespace

nanoseconds default_timeout() {
  const char* text = std::getenv("WINNOW_TIMEOUT_SECONDS");
  if (text == nullptr || *text == '\0') return kDefault;
  double seconds = 0;
  const char* end = text + std::strlen(text);
  const auto [stop, error] = std::from_chars(text, end, seconds);
  const double longest = std::chrono::duration<double>(kLongest).count();
  // At least a nanosecond is left after truncation, for 0 would mean the default.
  if (error != std::errc() || stop != end || !(seconds >= 1e-9) || !(seconds <= longest)) {
    throw Error(ErrorCode::invalid_argument, "expert_parallel::default_timeout",
                "WINNOW_TIMEOUT_SECONDS", "a number of seconds above 0 and at most a year",
                "\"" + std::string(text) + "\"");
  }
  return std::chrono::duration_cast<nanoseconds>(std::chrono::duration<double>(seconds));
}

Deadline::Deadline(nanoseconds timeout) : begin_(Clock::now()) {
  if (timeout < nanoseconds(0) || timeout > kLongest) {
    throw Error(ErrorCode::invalid_argument, "expert_parallel::Deadline", "timeout",
                "above 0 and at most a year, or 0 for the default", to_seconds(timeout));
  }
  end_ = begin_ + (timeout == nanoseconds(0) ? default_timeout() : timeout);
}

Deadline Deadline::now() {
  Deadline deadline(nanoseconds(1));
  deadline.end_ = deadline.begin_;
  return deadline;
}

nanoseconds Deadline::remaining() const {
  const nanoseconds left = end_ - Clock::now();
  return left > nanoseconds(0) ? left : nanoseconds(0);
}

std::string to_seconds(nanoseconds duration) {
  const double seconds = std::chrono::duration<double>(duration).count();
  char text[64];
  const int digits = std::abs(seconds) < 0.1 ? 3 : 1;  // 0.050 s, not 0.1 s
  const auto [end, error] =
      std::to_chars(text, text + sizeof(text), seconds, std::chars_format::fixed, digits);
  return error == std::errc() ? std::string(text, end) + " s" : "many s";
}

}  // namespace winnow::expert_parallel
