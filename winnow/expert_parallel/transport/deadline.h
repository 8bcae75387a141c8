// Deadlines of waits.
#pragma once

#include <chrono>
#include <string>

#include "winnow/core/export.h"

namespace winnow::expert_parallel {

// The value of the environment variable WINNOW_TIMEOUT_SECONDS, else 30 s. Errors (winnow::Error):
// the variable is not a number above 0 and at most a year.
WINNOW_EXPORT std::chrono::nanoseconds default_timeout();

// A point in time that the waits of one call share.
class WINNOW_EXPORT Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  // `timeout` from now; 0 stands for default_timeout(). Errors (winnow::Error): below 0, beyond a
  // year.
  explicit Deadline(std::chrono::nanoseconds timeout = {});
  // A deadline that has passed: a wait checks once and returns.
  static Deadline now();

  bool expired() const { return Clock::now() >= end_; }
  std::chrono::nanoseconds timeout() const { return end_ - begin_; }
  std::chrono::nanoseconds elapsed() const { return Clock::now() - begin_; }
  std::chrono::nanoseconds remaining() const;  // never below 0
  Clock::time_point end() const { return end_; }

 private:
  Clock::time_point begin_;
  Clock::time_point end_;
};

// "30.0 s", "0.2 s".
WINNOW_EXPORT std::string to_seconds(std::chrono::nanoseconds duration);

}  // namespace winnow::expert_parallel
