// `winnow launch`: starts the ranks of a world on this machine and waits for them.
#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <iostream>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "tools/winnow/commands.h"
#include "tools/winnow/printable.h"
#include "tools/winnow/standard_output.h"
#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "winnow/core/error.h"
#include "winnow/expert_parallel/rendezvous/process.h"
#include "winnow/expert_parallel/transport/deadline.h"

namespace winnow::cli {
namespace {

namespace fs = std::filesystem;
using expert_parallel::ProcessIdentity;
using std::chrono::nanoseconds;
using Clock = std::chrono::steady_clock;

// Between the request to end and the end.
constexpr std::chrono::seconds kTimeToEnd{1};
constexpr std::array kForwarded = {SIGINT, SIGTERM, SIGHUP, SIGQUIT};

[[noreturn]] void fail(const std::string& what, int error) {
  throw Error(ErrorCode::resource, "launch", what + ": " + std::strerror(error));
}

// ---- The folder in which the ranks meet.

constexpr std::string_view kFolder = "winnow-launch-";

// "winnow-launch-<process namespace>-<pid>-<start time>-": says whose it is.
std::string folder_name(const ProcessIdentity& owner) {
  std::string space;
  for (const char letter : owner.pid_namespace) {
    if (letter >= '0' && letter <= '9') space += letter;
  }
  return std::string(kFolder) + space + "-" + std::to_string(owner.pid) + "-" +
         std::to_string(owner.start_time) + "-";
}

// What launchers left that were killed with SIGKILL.
void remove_abandoned(const fs::path& parent, const ProcessIdentity& own) {
  std::error_code error;
  for (fs::directory_iterator entry(parent, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (!name.starts_with(kFolder)) continue;
    ProcessIdentity owner = own;
    const std::size_t pid = name.find('-', kFolder.size());
    if (pid == std::string::npos) continue;
    const char* end_of_name = name.data() + name.size();
    const auto read = std::from_chars(name.data() + pid + 1, end_of_name, owner.pid);
    if (read.ptr == end_of_name) continue;
    std::from_chars(read.ptr + 1, end_of_name, owner.start_time);
    // Its name as this process would write it: the same namespace, both numbers whole.
    if (!name.starts_with(folder_name(owner)) ||
        expert_parallel::state_of(owner) != expert_parallel::ProcessState::gone) {
      continue;
    }
    std::error_code ignored;  // another user's
    fs::remove_all(entry->path(), ignored);
  }
}

class RendezvousFolder {
 public:
  RendezvousFolder() {
    std::error_code error;
    const fs::path parent = fs::temp_directory_path(error);
    if (error) fail("TMPDIR names no folder", error.value());
    const ProcessIdentity own = expert_parallel::own_process();
    remove_abandoned(parent, own);
    std::string pattern = (parent / (folder_name(own) + "XXXXXX")).string();
    if (mkdtemp(pattern.data()) == nullptr) fail("cannot make " + pattern, errno);
    path_ = pattern;
  }
  ~RendezvousFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  RendezvousFolder(const RendezvousFolder&) = delete;
  RendezvousFolder& operator=(const RendezvousFolder&) = delete;
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

// ---- The ranks.

struct Rank {
  pid_t pid = -1;
  bool running = false;
  int status = 0;  // as waitpid() says it; 0 while it runs
};

int exit_code_of(int status) {
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

std::string end_of(int rank, int status) {
  const std::string who = "rank " + std::to_string(rank);
  if (!WIFSIGNALED(status))
    return who + " ended with exit code " + std::to_string(WEXITSTATUS(status));
  const int number = WTERMSIG(status);
  return who + " was killed by signal " + std::to_string(number) + " (" + strsignal(number) + ")";
}

void say(const std::string& text) {
  std::cerr << "winnow launch: " << printable(text) << std::endl;
}

// How long the ranks' waits last.
nanoseconds wait_of(const LaunchOptions& options) {
  if (!options.timeout_seconds) return expert_parallel::default_timeout();
  const double seconds = *options.timeout_seconds;
  if (!(seconds >= 1e-9 && seconds <= 365 * 24 * 3600.0)) {
    throw Error(ErrorCode::invalid_argument, "launch", "--timeout",
                "seconds above 0, at most a year", std::to_string(seconds));
  }
  return std::chrono::duration_cast<nanoseconds>(std::chrono::duration<double>(seconds));
}

class Launcher {
 public:
  explicit Launcher(const LaunchOptions& options)
      : options_(options), grace_(wait_of(options) + kTimeToEnd) {
    // From here on signals are waited for, not handled. Orphans of the ranks come to this process.
    sigemptyset(&signals_);
    // Inherited as ignored it would keep the ranks' ends from this process.
    signal(SIGCHLD, SIG_DFL);
    sigaddset(&signals_, SIGCHLD);
    for (const int number : kForwarded) {
      struct sigaction action{};
      sigaction(number, nullptr, &action);
      if (action.sa_handler != SIG_IGN) sigaddset(&signals_, number);  // as nohup leaves SIGHUP
    }
    sigprocmask(SIG_BLOCK, &signals_, &old_mask_);
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
  }
  ~Launcher() {
    kill_all(SIGKILL);
    const auto end = Clock::now() + kTimeToEnd;
    while (reap() && Clock::now() < end) usleep(1000);
    sigprocmask(SIG_SETMASK, &old_mask_, nullptr);
  }
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  int run() {
    for (int rank = 0; rank < options_.ranks; ++rank) start(rank);
    while (running() > 0) {
      take_signal();
      reap();
      look_for_failure();
      if (end_ && Clock::now() >= *end_) end_remaining();
    }
    return first_failed_ ? exit_code_of(first_failed_->status) : kOk;
  }

 private:
  void start(int rank) {
    int report[2];  // the child writes errno where it cannot run the command; else exec closes it
    if (pipe2(report, O_CLOEXEC) != 0) fail("cannot start a rank", errno);
    const pid_t launcher = getpid();
    const pid_t pid = fork();
    if (pid == 0) become_rank(rank, launcher, report[1]);
    const int error = errno;
    close(report[1]);
    if (pid < 0) {
      close(report[0]);
      fail("cannot start a rank", error);
    }
    setpgid(pid, pid);  // both sides do it: nobody can be early
    ranks_.push_back({pid, true, 0});
    int problem = 0;
    ssize_t count;
    do count = read(report[0], &problem, sizeof(problem));
    while (count < 0 && errno == EINTR);
    close(report[0]);
    if (count == static_cast<ssize_t>(sizeof(problem))) {
      throw Error(ErrorCode::invalid_argument, "launch", "COMMAND", "a program that can be run",
                  "\"" + options_.command[0] + "\": " + std::strerror(problem));
    }
  }

  [[noreturn]] void become_rank(int rank, pid_t launcher, int report) {
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != launcher) _exit(127);  // it died before the line above
    sigprocmask(SIG_SETMASK, &old_mask_, nullptr);
    restore_write_signals();
    const int ranks = options_.ranks;
    setenv("WINNOW_RANK", std::to_string(rank).c_str(), 1);
    setenv("WINNOW_WORLD_SIZE", std::to_string(ranks).c_str(), 1);
    setenv("WINNOW_LOCAL_WORLD_SIZE", std::to_string(ranks / options_.nodes).c_str(), 1);
    setenv("WINNOW_LOCAL_RANK", std::to_string(rank).c_str(), 1);  // all are on this machine
    setenv("WINNOW_RENDEZVOUS", folder_.path().c_str(), 1);
    setenv("WINNOW_JOB", folder_.path().c_str(), 1);  // no other job has this name
    if (options_.timeout_seconds) {
      std::ostringstream seconds;
      seconds << *options_.timeout_seconds;
      setenv("WINNOW_TIMEOUT_SECONDS", seconds.str().c_str(), 1);
    }
    // Ranks are no foreground job and share no input.
    const int nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (nothing >= 0) dup2(nothing, STDIN_FILENO);
    std::vector<char*> arguments;
    for (const std::string& argument : options_.command) {
      arguments.push_back(const_cast<char*>(argument.c_str()));
    }
    arguments.push_back(nullptr);
    execvp(arguments[0], arguments.data());
    const int error = errno;
    const ssize_t written = write(report, &error, sizeof(error));
    _exit(written == static_cast<ssize_t>(sizeof(error)) ? 127 : 126);
  }

  int running() const {
    int count = 0;
    for (const Rank& rank : ranks_) count += rank.running;
    return count;
  }

  // To the ranks that run, and what they have started.
  void kill_all(int number) {
    for (const Rank& rank : ranks_) {
      if (rank.running) kill(-rank.pid, number);
    }
  }

  void take_signal() {
    const nanoseconds left = end_ ? std::max<nanoseconds>(*end_ - Clock::now(), nanoseconds(0))
                                  : nanoseconds(std::chrono::hours(1));
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(left);
    const timespec time{seconds.count(), (left - seconds).count()};
    const int number = sigtimedwait(&signals_, nullptr, &time);
    if (number <= 0 || number == SIGCHLD) return;
    // Asked twice, it does not wait for the ranks any longer.
    kill_all(interrupted_ ? SIGKILL : number);
    kill_all(SIGCONT);
    interrupted_ = true;
    if (!end_) end_ = Clock::now() + grace_;
  }

  // Takes what has ended. Returns whether children are left.
  bool reap() {
    for (;;) {
      siginfo_t info{};
      if (waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) != 0) return errno != ECHILD;
      if (info.si_pid == 0) return true;
      const int rank = rank_of(info.si_pid);
      // What the rank has started ends with it; until it is taken, its number is nobody else's.
      if (rank >= 0) kill(-info.si_pid, SIGKILL);
      int status = 0;
      waitpid(info.si_pid, &status, 0);
      if (rank >= 0) ranks_[static_cast<std::size_t>(rank)] = {info.si_pid, false, status};
    }
  }

  int rank_of(pid_t pid) const {
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      if (ranks_[rank].running && ranks_[rank].pid == pid) return static_cast<int>(rank);
    }
    return -1;
  }

  // Of ranks found ended together, one that a signal killed counts as the first: the errors of the
  // others may be answers to its end.
  void look_for_failure() {
    if (first_failed_) return;
    const auto first = [&](const auto& condition) {
      const auto found = std::find_if(ranks_.begin(), ranks_.end(), condition);
      return found == ranks_.end() ? nullptr : &*found;
    };
    first_failed_ = first([](const Rank& rank) { return WIFSIGNALED(rank.status); });
    if (!first_failed_) first_failed_ = first([](const Rank& rank) { return rank.status != 0; });
    if (!first_failed_) return;
    say(end_of(static_cast<int>(first_failed_ - ranks_.data()), first_failed_->status));
    // The others notice at the deadline of their waits and say what they saw.
    if (!end_) end_ = Clock::now() + grace_;
  }

  void end_remaining() {
    if (!asked_) {
      for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
        if (ranks_[rank].running) {
          say("rank " + std::to_string(rank) + " still ran " + expert_parallel::to_seconds(grace_) +
              " later and is ended");
        }
      }
    }
    kill_all(asked_ ? SIGKILL : SIGTERM);
    kill_all(SIGCONT);
    asked_ = true;
    end_ = Clock::now() + kTimeToEnd;
  }

  const LaunchOptions& options_;
  nanoseconds grace_;  // a wait, and a little to report it
  RendezvousFolder folder_;
  sigset_t signals_{};
  sigset_t old_mask_{};
  std::vector<Rank> ranks_;
  const Rank* first_failed_ = nullptr;
  bool interrupted_ = false;
  bool asked_ = false;                    // the remaining ranks have been asked to end
  std::optional<Clock::time_point> end_;  // when ranks that still run are ended
};

}  // namespace

int run_launch(const LaunchOptions& options) {
  if (options.command.empty()) {
    throw Error(ErrorCode::invalid_argument, "launch", "COMMAND", "a program and its arguments",
                "nothing; for example: winnow launch -n 4 -- ./program");
  }
  if (options.nodes < 1 || options.ranks % options.nodes != 0) {
    throw Error(ErrorCode::invalid_argument, "launch", "--nodes",
                "a divisor of -n " + std::to_string(options.ranks), std::to_string(options.nodes));
  }
  return Launcher(options).run();
}

}  // namespace winnow::cli
