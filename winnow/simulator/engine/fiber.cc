// A fiber's first switch is one of ucontext, which sets the stack but costs system calls for the
// signal mask; the later ones are _setjmp and _longjmp, 20 times as fast. One whose body has
// returned waits on its stack for the next body.
#undef _FORTIFY_SOURCE  // it forbids longjmp between stacks
#include "winnow/simulator/engine/fiber.h"

#include <cstdint>
#include <new>

#include <sys/mman.h>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace winnow::simulator {
namespace {

constexpr std::size_t kGuardBytes = 4096;

// AddressSanitizer wants to know of every switch, before and after it.
void leave_stack([[maybe_unused]] void** fake, [[maybe_unused]] const void* to,
                 [[maybe_unused]] std::size_t bytes) {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(fake, to, bytes);
#endif
}
void arrive_on_stack([[maybe_unused]] void* fake, [[maybe_unused]] const void** from,
                     [[maybe_unused]] std::size_t* bytes) {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(fake, from, bytes);
#endif
}

}  // namespace

Fiber::Fiber() {
  void* const memory = mmap(nullptr, kStackBytes + kGuardBytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  mprotect(memory, kGuardBytes, PROT_NONE);  // the stack grows down
  stack_ = static_cast<std::byte*>(memory) + kGuardBytes;
}

Fiber::~Fiber() { munmap(stack_ - kGuardBytes, kStackBytes + kGuardBytes); }

void Fiber::start(void (*body)(void*), void* argument) {
#ifdef __SANITIZE_ADDRESS__
  __asan_unpoison_memory_region(stack_, kStackBytes);  // of frames that were given up
#endif
  body_ = body;
  argument_ = argument;
  begun_ = begun_ && finished_;
  finished_ = false;
}

void Fiber::resume() {
  void* fake = nullptr;
  if (_setjmp(resumed_from_) == 0) {
    leave_stack(&fake, stack_, kStackBytes);
    if (begun_) _longjmp(here_, 1);
    begun_ = true;
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack_;
    context_.uc_stack.ss_size = kStackBytes;
    context_.uc_link = nullptr;
    const auto self = reinterpret_cast<std::uintptr_t>(this);
    makecontext(&context_, reinterpret_cast<void (*)()>(&Fiber::enter), 2,
                static_cast<unsigned>(self), static_cast<unsigned>(self >> 32));
    swapcontext(&entered_from_, &context_);
  }
  arrive_on_stack(fake, nullptr, nullptr);
}

void Fiber::enter(unsigned low, unsigned high) {
  reinterpret_cast<Fiber*>(static_cast<std::uintptr_t>(high) << 32 | low)->run();
}

void Fiber::run() {
  arrive_on_stack(nullptr, &other_stack_, &other_stack_bytes_);
  for (;;) {
    body_(argument_);
    finished_ = true;
    suspend();
  }
}

void Fiber::suspend() {
  void* fake = nullptr;
  if (_setjmp(here_) == 0) {
    leave_stack(finished_ ? nullptr : &fake, other_stack_, other_stack_bytes_);
    _longjmp(resumed_from_, 1);
  }
  arrive_on_stack(fake, &other_stack_, &other_stack_bytes_);
}

}  // namespace winnow::simulator
