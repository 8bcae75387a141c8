// Ends a call of the CPU, or a wait of the host, before its time at the request of the program, for
// instance on Ctrl-C.
#pragma once

#include <chrono>

#include "winnow/core/export.h"

namespace winnow {

// Called about twenty times a second on a thread in a call that computes on the CPU, or in a wait.
// If it throws, the call ends with its exception: nothing is written any more, what has been
// written by then stays, and the other ranks are told that this rank was interrupted. The hook may
// call operations. Null: no hook. The Python package has one, which raises KeyboardInterrupt.
using InterruptHook = void (*)();
WINNOW_EXPORT void set_interrupt_hook(InterruptHook hook);

// The calls of the hook during one wait or loop. Internal.
class WINNOW_EXPORT Interrupts {
 public:
  // Calls the hook if the last call was long enough ago.
  void look();
  // The same in a loop each of whose steps may take less time than a look.
  void step() {
    if (++steps_ % kStepsOfALook == 0) look();
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds kPause{50};
  static constexpr unsigned kStepsOfALook = 1024;
  Clock::time_point next_ = Clock::now() + kPause;
  unsigned steps_ = 0;
};

}  // namespace winnow
