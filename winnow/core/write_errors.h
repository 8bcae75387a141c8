// Makes failed writes to files and pipes return an error instead of raising a signal. Internal.
#pragma once

#include <array>
#include <cerrno>
#include <csignal>
#include <ctime>

namespace winnow {

// While an object of this class exists, SIGXFSZ and SIGPIPE are blocked in the calling thread: its
// writes beyond the file size limit (ulimit -f) fail with EFBIG, and those to a pipe without a
// reader with EPIPE. The destructor discards signals that became pending and keeps errno.
class WriteErrorsAreReturned {
 public:
  WriteErrorsAreReturned() {
    sigset_t pending, signals;
    sigpending(&pending);
    sigemptyset(&signals);
    for (std::size_t i = 0; i < kSignals.size(); ++i) {
      sigaddset(&signals, kSignals[i]);
      was_pending_[i] = sigismember(&pending, kSignals[i]) == 1;
    }
    pthread_sigmask(SIG_BLOCK, &signals, &before_);
  }
  ~WriteErrorsAreReturned() {
    const int error = errno;
    constexpr timespec kAtOnce{0, 0};
    for (std::size_t i = 0; i < kSignals.size(); ++i) {
      sigset_t signal;
      sigemptyset(&signal);
      sigaddset(&signal, kSignals[i]);
      if (!was_pending_[i]) sigtimedwait(&signal, nullptr, &kAtOnce);
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
    errno = error;
  }
  WriteErrorsAreReturned(const WriteErrorsAreReturned&) = delete;
  WriteErrorsAreReturned& operator=(const WriteErrorsAreReturned&) = delete;

 private:
  static constexpr std::array kSignals = {SIGXFSZ, SIGPIPE};
  sigset_t before_;
  std::array<bool, kSignals.size()> was_pending_{};
};

}  // namespace winnow
