// Tests whose ranks are processes with a GPU each, on the transport nvshmem. Each process is the
// test program again, started as a launcher would, and runs one of its bodies. Only for tests
// in builds with CUDA: needs GoogleTest.
#pragma once

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "winnow/core/device.h"
#include "winnow/expert_parallel/rendezvous/launch_environment.h"
#include "winnow/expert_parallel/rendezvous/store.h"
#include "winnow/expert_parallel/testing/all_to_all_check.h"
#include "winnow/expert_parallel/testing/test_ranks.h"
#include "winnow/expert_parallel/transport/nvshmem/nvshmem.h"
#include "winnow/expert_parallel/transport/nvshmem/nvshmem_library.h"

namespace winnow::expert_parallel {

inline constexpr int kRanks = 2;
inline constexpr int kVictim = 1;  // of tests in which a rank is killed, stopped or late

// ---- What a process is and does.

struct Rank {
  LaunchEnvironment environment = launch_environment().value();
  std::shared_ptr<Store> store = std::make_shared<FileStore>(environment.rendezvous);
  Device gpu{DeviceType::cuda, environment.local_rank};
  int rank = environment.rank;

  std::shared_ptr<Transport> join(const std::string& prefix = "winnow") const {
    return create_nvshmem(store, rank, environment.world_size, gpu, generous(), prefix);
  }
};

// What a body returns or throws is its process's answer.
using Body = std::string (*)(const Rank& me);
using Bodies = std::map<std::string, Body>;

inline void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

inline void want(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}
inline void want_passed(const std::vector<testing::Comparison>& comparisons) {
  for (const testing::Comparison& one : comparisons) {
    if (!one.passed) throw std::runtime_error(one.what + ": " + one.detail);
  }
}

inline double seconds_since(Deadline::Clock::time_point begin) {
  return std::chrono::duration<double>(Deadline::Clock::now() - begin).count();
}

// ---- Starting them.

// This program as a rank. What it prints is its answer; it ends by returning from main().
class Process : public RankProcess {
 public:
  Process(const std::string& body, int rank, const std::string& rendezvous)
      : RankProcess([&](int answer) {
          prctl(PR_SET_PDEATHSIG, SIGKILL);  // none outlives the test
          dup2(answer, 100);
          close(answer);
          setenv("WINNOW_TEST_BODY", body.c_str(), 1);
          setenv("WINNOW_RANK", std::to_string(rank).c_str(), 1);
          setenv("WINNOW_WORLD_SIZE", std::to_string(kRanks).c_str(), 1);
          setenv("WINNOW_RENDEZVOUS", rendezvous.c_str(), 1);
          execl("/proc/self/exe", "rank", nullptr);
          _exit(127);
        }) {}

  // Its answer and how it ended. The end of a process must not hang either.
  std::string wait() {
    kill(pid_, SIGCONT);  // it may have been left stopped
    const std::string text = answer();
    const auto begin = Deadline::Clock::now();
    int status = 0;
    while (waitpid(pid_, &status, WNOHANG) == 0) {
      sleep_ms(2);
      if (Deadline::Clock::now() - begin < std::chrono::seconds(20)) continue;
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
      return text + "\nits end hung";
    }
    pid_ = -1;
    std::printf("  a process ended %.2f s after its answer\n", seconds_since(begin));
    if (WIFSIGNALED(status)) return text + "killed by signal " + std::to_string(WTERMSIG(status));
    return WEXITSTATUS(status) == 0 ? text
                                    : text + "exit code " + std::to_string(WEXITSTATUS(status));
  }
};

class GpuProcesses : public ::testing::Test {
 protected:
  void SetUp() override {
    // In another process, since this one must stay clean of CUDA until it has started the ranks.
    static const std::string gpus = Process("count_gpus", 0, "/tmp").wait();
    if (std::atoi(gpus.c_str()) < kRanks) GTEST_SKIP() << "wants two GPUs and NVSHMEM: " << gpus;
  }
  // The answers of all ranks.
  std::vector<std::string> run(const std::string& body) {
    std::vector<Process> processes;
    for (int rank = 0; rank < kRanks; ++rank) processes.emplace_back(body, rank, folder_.path());
    std::vector<std::string> answers;
    const auto begin = Deadline::Clock::now();
    for (Process& process : processes) answers.push_back(process.wait());
    std::printf("  %s: %.2f s\n", body.c_str(), seconds_since(begin));
    return answers;
  }
  TemporaryFolder folder_;
};

// ---- The program.

// As a rank: the body's answer, with a zero behind it.
inline int run_body(const Bodies& bodies, const std::string& name) {
  std::string answer;
  const std::string error = error_of([&] { answer = bodies.at(name)(Rank()); });
  if (!error.empty()) answer = error;
  const ssize_t size = static_cast<ssize_t>(answer.size()) + 1;
  return write(100, answer.c_str(), answer.size() + 1) == size ? 0 : 1;
}

inline std::string count_gpus(const Rank&) {
  const std::string error = error_of([] { nvshmem_library(); });
  return error.empty() ? std::to_string(gpus().gpus.size()) : error;
}

// What main() returns.
inline int run_tests(int argc, char** argv, Bodies bodies) {
  bodies["count_gpus"] = count_gpus;
  if (const char* body = std::getenv("WINNOW_TEST_BODY")) return run_body(bodies, body);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}

}  // namespace winnow::expert_parallel
