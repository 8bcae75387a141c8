#include "winnow/expert_parallel/rendezvous/peer_watch.h"

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <list>
#include <mutex>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "winnow/core/error.h"

namespace winnow::expert_parallel {
namespace {

// For processes that the kernel does not tell of: it is old, or forbids it.
constexpr int kLookMilliseconds = 100;

// A file that becomes readable when the process ends; -1 where there is none.
int open_process(std::int64_t pid) {
#ifdef SYS_pidfd_open
  return static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0));
#else
  static_cast<void>(pid);
  return -1;
#endif
}

class Watcher {
 public:
  struct Target {
    int index;
    ProcessIdentity process;
    int file;
  };
  struct Watch {
    std::function<void(int)> gone;
    std::vector<Target> targets;  // those that have not ended
  };
  using Handle = std::list<Watch>::iterator;

  static Watcher& instance();  // never destroyed

  Handle add(const std::vector<ProcessIdentity>& processes, std::function<void(int)> gone) {
    Watch watch{std::move(gone), {}};
    for (std::size_t i = 0; i < processes.size(); ++i) {
      const int file = open_process(processes[i].pid);
      // In this order: the file is that process's, or the process has ended.
      const ProcessState state = state_of(processes[i]);
      if (state == ProcessState::gone) watch.gone(static_cast<int>(i));
      if (state == ProcessState::running || state == ProcessState::stopped) {
        watch.targets.push_back({static_cast<int>(i), processes[i], file});
      } else if (file >= 0) {
        close(file);
      }
    }
    const std::lock_guard lock(mutex_);
    watches_.push_back(std::move(watch));
    try {
      if (!thread_.joinable() && !over_) start();
    } catch (const Error&) {
      close_files(watches_.back());
      watches_.pop_back();
      throw;
    }
    wake();
    return std::prev(watches_.end());
  }

  void remove(Handle watch) {
    std::unique_lock lock(mutex_);
    close_files(*watch);
    watches_.erase(watch);
    if (watches_.empty()) stop(lock);
  }

  void stop_for_good() {
    std::unique_lock lock(mutex_);
    over_ = true;
    stop(lock);
  }

  // Around a fork(), so that the child finds everything whole, and begins without any of it.
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }
  void forget_parent() {
    for (const Watch& watch : watches_) close_files(watch);
    if (wake_ >= 0) close(std::exchange(wake_, -1));
    new (&watches_) std::list<Watch>;  // owners of the parent's watches release nothing
    new (&thread_) std::thread;        // it is not in this process
    mutex_.unlock();
  }

 private:
  static void close_files(const Watch& watch) {
    for (const Target& target : watch.targets) {
      if (target.file >= 0) close(target.file);
    }
  }

  void start() {
    wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_ < 0) fail(std::strerror(errno));
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    std::string error;
    try {
      thread_ = std::thread([this, file = wake_] { run(file); });
      pthread_setname_np(thread_.native_handle(), "winnow-peers");
    } catch (const std::system_error& refused) {
      error = refused.what();
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (error.empty()) return;
    close(std::exchange(wake_, -1));
    fail(error);
  }
  [[noreturn]] static void fail(const std::string& why) {
    throw Error(ErrorCode::resource, "expert_parallel",
                "no thread that watches for the end of other ranks: " + why);
  }

  // The thread ends when its file is not the one that wakes it any more.
  void stop(std::unique_lock<std::mutex>& lock) {
    if (!thread_.joinable()) return;
    std::thread thread = std::exchange(thread_, {});
    const int file = std::exchange(wake_, -1);
    write_one(file);
    lock.unlock();
    thread.join();
    close(file);
  }

  void wake() const {
    if (wake_ >= 0) write_one(wake_);
  }
  static void write_one(int file) {
    const std::uint64_t one = 1;
    while (write(file, &one, sizeof(one)) < 0 && errno == EINTR) {
    }
  }

  void run(int wake_file) {
    std::unique_lock lock(mutex_);
    while (wake_ == wake_file) {
      std::vector<pollfd> files{{wake_file, POLLIN, 0}};
      int timeout = -1;
      for (const Watch& watch : watches_) {
        for (const Target& target : watch.targets) {
          if (target.file < 0) timeout = kLookMilliseconds;
          files.push_back({target.file, POLLIN, 0});  // poll() passes over -1
        }
      }
      lock.unlock();
      poll(files.data(), files.size(), timeout);
      std::uint64_t count;
      while (read(wake_file, &count, sizeof(count)) > 0) {
      }
      lock.lock();
      if (wake_ != wake_file) return;
      for (Watch& watch : watches_) notify(watch);
    }
  }

  static void notify(Watch& watch) {
    std::erase_if(watch.targets, [&](const Target& target) {
      pollfd file{target.file, POLLIN, 0};
      const bool ended =
          target.file >= 0 ? poll(&file, 1, 0) > 0 : state_of(target.process) == ProcessState::gone;
      if (!ended) return false;
      if (target.file >= 0) close(target.file);
      watch.gone(target.index);
      return true;
    });
  }

  std::mutex mutex_;
  std::list<Watch> watches_;
  std::thread thread_;
  int wake_ = -1;
  bool over_ = false;  // the program ends
};

Watcher& Watcher::instance() {
  static Watcher* const watcher = [] {
    auto* made = new Watcher;
    pthread_atfork([] { instance().lock(); }, [] { instance().unlock(); },
                   [] { instance().forget_parent(); });
    // What is told of an end may be gone when the program's other exit handlers have run.
    std::atexit([] { instance().stop_for_good(); });
    return made;
  }();
  return *watcher;
}

// A watch that lets go of itself.
class Held {
 public:
  Held(const std::vector<ProcessIdentity>& processes, std::function<void(int)> gone)
      : watch_(Watcher::instance().add(processes, std::move(gone))) {}
  ~Held() {
    if (fork_generation_ == fork_generation()) Watcher::instance().remove(watch_);
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

 private:
  int fork_generation_ = fork_generation();
  Watcher::Handle watch_;
};

}  // namespace

PeerWatch watch_processes(const std::vector<ProcessIdentity>& processes,
                          std::function<void(int)> gone) {
  return std::make_shared<Held>(processes, std::move(gone));
}

}  // namespace winnow::expert_parallel
