// Ends a wait of the host before its deadline at the request of the program, for instance on
// Ctrl-C. Internal; the Python binding sets the hook.
#pragma once

#include <chrono>

#include "winnow/core/export.h"

namespace winnow::expert_parallel {

// Called on a waiting thread about twenty times a second. If it throws, the wait and the call end
// with its exception, and the other ranks are told that this rank was interrupted. Null: no hook.
using InterruptHook = void (*)();
WINNOW_EXPORT void set_interrupt_hook(InterruptHook hook);

// The calls of the hook during one wait.
class WINNOW_EXPORT Interrupts {
 public:
  // Calls the hook if the last call was long enough ago.
  void look();

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds kPause{50};
  Clock::time_point next_ = Clock::now() + kPause;
};

}  // namespace winnow::expert_parallel
