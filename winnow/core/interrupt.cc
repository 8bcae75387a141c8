#include "winnow/core/interrupt.h"

#include <atomic>

namespace winnow {
namespace {

std::atomic<InterruptHook> g_hook{nullptr};

}  // namespace

void set_interrupt_hook(InterruptHook hook) { g_hook.store(hook, std::memory_order_release); }

void Interrupts::look() {
  const InterruptHook hook = g_hook.load(std::memory_order_acquire);
  if (hook == nullptr) return;
  const auto now = Clock::now();
  if (now < next_) return;
  next_ = now + kPause;
  hook();
}

}  // namespace winnow
