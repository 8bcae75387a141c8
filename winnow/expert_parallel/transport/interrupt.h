// How a wait of the host ends before its deadline because the program wants it to: a key was
// pressed. Internal; the Python binding sets the hook.
#pragma once

#include <chrono>

#include "winnow/core/export.h"

namespace winnow::expert_parallel {

// Called on a waiting thread some twenty times a second. What it throws ends that wait, and the
// call, on this rank; the other ranks are told that the rank was interrupted. Null: no hook.
using InterruptHook = void (*)();
WINNOW_EXPORT void set_interrupt_hook(InterruptHook hook);

// The looks of one wait at the hook.
class WINNOW_EXPORT Interrupts {
 public:
  // Calls the hook where the last look was long enough ago.
  void look();

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds kPause{50};
  Clock::time_point next_ = Clock::now() + kPause;
};

}  // namespace winnow::expert_parallel
