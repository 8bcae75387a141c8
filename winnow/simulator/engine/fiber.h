// Threads of a kernel as fibers: each with a stack of its own, all in one thread of the process.
#pragma once

#include <csetjmp>
#include <cstddef>

#include <ucontext.h>

namespace winnow::simulator {

class Fiber {
 public:
  Fiber();
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // The fiber is to run body(argument) when it is next resumed. What it did before is forgotten.
  void start(void (*body)(void*), void* argument);
  // Runs the fiber until it suspends itself or its body returns.
  void resume();
  // Called in the fiber: goes on behind resume().
  void suspend();
  bool finished() const { return finished_; }
  // Whether the address is in the fiber's stack.
  bool has_on_stack(const void* address) const {
    const auto* const at = static_cast<const std::byte*>(address);
    return at >= stack_ && at < stack_ + kStackBytes;
  }

 private:
  static void enter(unsigned low, unsigned high);
  [[noreturn]] void run();

  // AddressSanitizer's frames are several times as large.
#ifdef __SANITIZE_ADDRESS__
  static constexpr std::size_t kStackBytes = 512 * 1024;
#else
  static constexpr std::size_t kStackBytes = 64 * 1024;
#endif
  std::byte* stack_;
  ucontext_t context_, entered_from_;
  std::jmp_buf here_, resumed_from_;
  void (*body_)(void*) = nullptr;
  void* argument_ = nullptr;
  bool begun_ = false, finished_ = true;
  // What AddressSanitizer knows of the stack that resumed the fiber.
  const void* other_stack_ = nullptr;
  std::size_t other_stack_bytes_ = 0;
};

}  // namespace winnow::simulator
