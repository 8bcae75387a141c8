// Writing files under a limit of their size (ulimit -f). Internal.
#pragma once

#include <cerrno>
#include <csignal>
#include <ctime>

namespace winnow {

// While it lives, what the calling thread writes beyond the limit fails with EFBIG, instead of
// ending the process by SIGXFSZ. Leaves errno as it is.
class FileSizeLimitFails {
 public:
  FileSizeLimitFails() {
    sigemptyset(&signal_);
    sigaddset(&signal_, SIGXFSZ);
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGXFSZ) == 1;
    pthread_sigmask(SIG_BLOCK, &signal_, &before_);
  }
  ~FileSizeLimitFails() {
    const int error = errno;
    constexpr timespec kAtOnce{0, 0};
    if (!was_pending_) sigtimedwait(&signal_, nullptr, &kAtOnce);
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
    errno = error;
  }
  FileSizeLimitFails(const FileSizeLimitFails&) = delete;
  FileSizeLimitFails& operator=(const FileSizeLimitFails&) = delete;

 private:
  sigset_t signal_, before_;
  bool was_pending_;
};

}  // namespace winnow
