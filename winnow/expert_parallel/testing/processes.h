// Ranks that are forked processes, which tests kill and stop. Only for tests: needs GoogleTest.
#pragma once

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "winnow/expert_parallel/testing/all_to_all_ranks.h"
#include "winnow/expert_parallel/transport/shared_memory/shared_memory.h"

namespace winnow::expert_parallel {

// What a child tells its parent.
struct RankReport {
  std::atomic<int> stage;  // that the child has reached
  char text[1500];         // of the first error that it met
  int code;                // ErrorCode, -1 without an error
  double seconds;          // that the failing call took
  char wrong[500];         // what it found wrong; empty: nothing

  void take(const Outcome& outcome) {
    std::strncpy(text, outcome.text.c_str(), sizeof(text) - 1);
    code = outcome.code.has_value() ? int(*outcome.code) : -1;
    seconds = outcome.seconds;
  }
  void complain(const std::string& what) {
    if (wrong[0] == 0) std::strncpy(wrong, what.c_str(), sizeof(wrong) - 1);
  }
  void expect(const Comparisons& comparisons) {
    for (const auto& one : comparisons.list()) {
      if (!one.passed) complain(one.what + ": " + one.detail);
    }
  }
};

// Forked ranks, and a page that they share with this process. A test forks before it has threads;
// a child never returns to GoogleTest.
class Processes {
 public:
  using Body = std::function<void(int rank, RankReport& report)>;

  Processes(int count, const Body& body) : children_(std::size_t(count)) {
    void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    EXPECT_NE(memory, MAP_FAILED);
    reports_ = static_cast<RankReport*>(memory);
    for (int rank = 0; rank < count; ++rank) {
      new (&reports_[rank]) RankReport{};
      children_[std::size_t(rank)] = fork();
      if (children_[std::size_t(rank)] != 0) continue;
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      try {
        body(rank, reports_[rank]);
      } catch (const std::exception& error) {
        reports_[rank].complain(error.what());
      }
      _exit(0);
    }
  }
  ~Processes() {
    for (std::size_t rank = 0; rank < children_.size(); ++rank) {
      if (children_[rank] > 0) {
        kill(children_[rank], SIGKILL);
        waitpid(children_[rank], nullptr, 0);
      }
    }
    munmap(reports_, kBytes);
  }
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;

  const RankReport& report(int rank) const { return reports_[rank]; }
  pid_t process(int rank) const { return children_[std::size_t(rank)]; }
  bool running(int rank) const {
    siginfo_t info{};
    return waitid(P_PID, id_t(process(rank)), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
           info.si_pid == 0;
  }
  void send(int rank, int signal) { kill(children_[std::size_t(rank)], signal); }
  // Waits until the rank has reached the stage.
  void await(int rank, int stage, double seconds = 30) {
    await([&] { return reports_[rank].stage.load() >= stage; }, seconds,
          "stage " + std::to_string(stage) + " of rank " + std::to_string(rank));
  }
  void await_stopped(int rank) {
    int status = 0;
    await([&] { return waitpid(children_[std::size_t(rank)], &status, WUNTRACED | WNOHANG) != 0; },
          30, "the stop of rank " + std::to_string(rank));
    EXPECT_TRUE(WIFSTOPPED(status));
  }
  // Waits for the end of the rank: its wait status, or -1 after `seconds`.
  int join(int rank, double seconds = 30) {
    int status = -1;
    pid_t& child = children_[std::size_t(rank)];
    const bool ended = await([&] { return waitpid(child, &status, WNOHANG) == child; }, seconds,
                             "the end of rank " + std::to_string(rank));
    if (ended) child = 0;
    return ended ? status : -1;
  }
  void expect_ended_well(int rank) {
    EXPECT_EQ(join(rank), 0) << "rank " << rank;
    EXPECT_STREQ(report(rank).wrong, "") << "rank " << rank;
  }

 private:
  static constexpr std::size_t kBytes = 64 * 1024;

  template <class Done>
  bool await(const Done& done, double seconds, const std::string& what) {
    const auto start = std::chrono::steady_clock::now();
    while (!done()) {
      if (seconds_since(start) > seconds) {
        ADD_FAILURE() << "waited in vain for " << what;
        return false;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    return true;
  }

  RankReport* reports_ = nullptr;
  std::vector<pid_t> children_;
};

// A rank of a world of processes.
struct ProcessRank {
  std::shared_ptr<Store> store;
  std::shared_ptr<Transport> transport;
  ProcessRank(const std::filesystem::path& folder, int rank, int world_size,
              const std::string& prefix = "winnow",
              std::chrono::milliseconds timeout = std::chrono::seconds(60))
      : store(std::make_shared<FileStore>(folder, "test")),
        transport(create_shared_memory(*store, rank, world_size, Deadline(timeout), prefix)) {}
};

}  // namespace winnow::expert_parallel
