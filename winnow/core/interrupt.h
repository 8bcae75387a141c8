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

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds kPause{50};
  Clock::time_point next_ = Clock::now() + kPause;
};

}  // namespace winnow
