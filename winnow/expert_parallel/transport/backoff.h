// How a wait passes its time: a few spins, then it yields, and after a millisecond it sleeps, so
// that more ranks than cores get on and a stuck one costs little. Internal.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

#include <sched.h>

namespace winnow::expert_parallel {

class Backoff {
 public:
  void pause() {
    if (spins_ < kSpins) {
      ++spins_;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
      return;
    }
    const auto now = Clock::now();
    if (spins_ == kSpins) {
      ++spins_;
      yielding_since_ = now;
    }
    if (now - yielding_since_ < std::chrono::milliseconds(1)) {
      sched_yield();
      return;
    }
    std::this_thread::sleep_for(sleep_);
    sleep_ = std::min(2 * sleep_, kLongestSleep);
  }

  // Past the spins: there is time to look at clocks and processes.
  bool patient() const { return spins_ >= kSpins; }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr int kSpins = 64;
  static constexpr std::chrono::microseconds kLongestSleep{200};

  int spins_ = 0;
  Clock::time_point yielding_since_{};
  std::chrono::microseconds sleep_{50};
};

}  // namespace winnow::expert_parallel
