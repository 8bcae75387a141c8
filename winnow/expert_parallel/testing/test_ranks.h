// Ranks as threads and as processes, for tests.
#pragma once

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include "winnow/core/error.h"
#include "winnow/expert_parallel/testing/leftovers.h"
#include "winnow/expert_parallel/transport/deadline.h"

namespace winnow::expert_parallel {

// Stores of files need the name of the job; a test is a job of its own.
inline const int kJobIsNamed = setenv("WINNOW_JOB", "test", 1);

// For waits that should succeed: machines may be slow.
inline Deadline generous() { return Deadline(std::chrono::seconds(60)); }
// For waits that should fail. What the rank must see before has to be there when this begins.
inline Deadline brief(int milliseconds = 300) {
  return Deadline(std::chrono::milliseconds(milliseconds));
}
inline void sleep_ms(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

// The text of what the call threw; empty if nothing.
inline std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

// Runs the body on a thread per rank and returns the text of what each threw.
inline std::vector<std::string> on_threads(int ranks, const std::function<void(int)>& body) {
  std::vector<std::string> errors(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back(
        [&, rank] { errors[static_cast<std::size_t>(rank)] = error_of([&] { body(rank); }); });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

// The same, where no rank may throw.
inline void expect_all_return(int ranks, const std::function<void(int)>& body) {
  for (const std::string& error : on_threads(ranks, body)) EXPECT_EQ(error, "");
}

// Replaces the time in "waited 0.3 s", which differs from run to run, by #. (std::regex takes the
// compiler five seconds in every file.)
inline std::string without_seconds(std::string text) {
  const std::string before = "waited ";
  for (std::size_t at = 0; (at = text.find(before, at)) != std::string::npos;) {
    at += before.size();
    const std::size_t end = text.find_first_not_of("0123456789.", at);
    if (end != std::string::npos && end > at && text.compare(end, 2, " s") == 0) {
      text.replace(at, end - at, "#");
    }
  }
  return text;
}

inline void replace_all(std::string& text, const std::string& from, const std::string& to) {
  for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size()) {
    text.replace(at, from.size(), to);
  }
}

// A child process that runs the body; what the body returns or throws comes back as text.
// Start the processes of a test before any thread.
class RankProcess {
 public:
  explicit RankProcess(const std::function<std::string()>& body)
      : RankProcess([&](int answer) {
          std::string text;
          const std::string error = error_of([&] { text = body(); });
          if (!error.empty()) text = error;
          const ssize_t written = write(answer, text.data(), text.size());
          _exit(written == static_cast<ssize_t>(text.size()) ? 0 : 1);
        }) {}
  RankProcess(RankProcess&& other) noexcept
      : pid_(std::exchange(other.pid_, -1)), answer_(std::exchange(other.answer_, -1)) {}
  RankProcess& operator=(RankProcess&&) = delete;
  ~RankProcess() {
    if (pid_ > 0) {
      signal(SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
    if (answer_ >= 0) close(answer_);
  }

  pid_t pid() const { return pid_; }
  void signal(int number) const { kill(pid_, number); }

  void await_stopped() const { waitpid(pid_, nullptr, WUNTRACED); }

  // Waits for the end of the process. Returns its text, or "killed by signal 9".
  std::string wait() {
    const std::string text = answer();
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFSIGNALED(status) ? "killed by signal " + std::to_string(WTERMSIG(status)) : text;
  }

 protected:
  // The child runs `body`, which gets the end of the pipe for its answer and does not return.
  explicit RankProcess(const std::function<void(int)>& body) {
    int ends[2];
    if (pipe(ends) != 0) throw std::runtime_error("no pipe");
    pid_ = fork();
    if (pid_ == 0) {
      close(ends[0]);
      body(ends[1]);
    }
    close(ends[1]);
    answer_ = ends[0];
  }
  // Up to a zero, behind which the process may go on, or to its end.
  std::string answer() const {
    std::string text;
    char buffer[1024];
    for (ssize_t count; (count = read(answer_, buffer, sizeof(buffer))) != 0;) {
      if (count > 0) text.append(buffer, static_cast<std::size_t>(count));
      if (text.ends_with('\0')) return text.substr(0, text.size() - 1);
      if (count < 0 && errno != EINTR) break;
    }
    return text;
  }

  pid_t pid_ = -1;
  int answer_ = -1;
};

}  // namespace winnow::expert_parallel
