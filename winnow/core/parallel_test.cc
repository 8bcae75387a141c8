// Threads of the CPU backend: how many, that loops cover everything once, and fork().
#include "winnow/core/parallel.h"

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <limits>
#include <new>
#include <thread>
#include <vector>

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "winnow/core/executor.h"
#include "winnow/core/interrupt.h"
#include "winnow/expert_parallel/testing/ranks.h"
#include "winnow/sparse_mla/test_problem.h"
#include "winnow/testing/expect.h"
#include "winnow/testing/in_child.h"

namespace {
std::atomic<int> g_threads_left{std::numeric_limits<int>::max()};  // that may be created
}

// Stands before the system's function for the whole process. A limit of processes does the same,
// but does not hold for root.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*start)(void*), void* argument) {
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto create = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  if (--g_threads_left < 0) return EAGAIN;
  return create(thread, attributes, start, argument);
}

namespace winnow {
namespace {

// The setting is for the process and cannot be taken back: tests that need it unset run in a child.
using testing::in_child;

bool refused(const char* text) {
  setenv("WINNOW_NUM_THREADS", text, 1);
  try {
    num_threads();
    return false;
  } catch (const Error& error) {
    return error.code() == ErrorCode::invalid_argument &&
           std::string(error.what()) ==
               "num_threads: WINNOW_NUM_THREADS: want a whole number of 1 or more, got \"" +
                   std::string(text) + "\"";
  }
}

TEST(Parallel, EnvironmentSaysHowManyThreads) {
  EXPECT_TRUE(in_child([] {
    setenv("WINNOW_NUM_THREADS", "7", 1);
    if (num_threads() != 7) return false;
    setenv("WINNOW_NUM_THREADS", "", 1);
    if (num_threads() < 1) return false;
    // What the program sets counts more.
    setenv("WINNOW_NUM_THREADS", "7", 1);
    set_num_threads(3);
    return num_threads() == 3;
  }));
}

// As launchers set it. torchrun's own is in test_reliability.py.
TEST(Parallel, OpenMPsEnvironmentCountsToo) {
  EXPECT_TRUE(in_child([] {
    unsetenv("WINNOW_NUM_THREADS");
    unsetenv("OMP_NUM_THREADS");
    const int processors = num_threads();
    for (const char* ignored : {"", "0", "-3", "many"}) {
      setenv("OMP_NUM_THREADS", ignored, 1);
      if (num_threads() != processors) return false;
    }
    setenv("OMP_NUM_THREADS", " 5,2", 1);
    if (num_threads() != 5) return false;
    setenv("WINNOW_NUM_THREADS", "7", 1);
    return num_threads() == 7;
  }));
}

TEST(Parallel, EnvironmentThatIsNoCountIsRefused) {
  for (const char* text : {"0", "-2", "two", "2x", " 2", "2.5", "99999999999999999999"}) {
    EXPECT_TRUE(in_child([text] { return refused(text); })) << text;
  }
  // An operation that needs the count passes the error on, with its outputs untouched.
  EXPECT_TRUE(in_child([] {
    setenv("WINNOW_NUM_THREADS", "none", 1);
    sparse_mla::TestProblem problem;
    testing::fill_unwritten(problem.out);
    try {
      sparse_mla::forward(sparse_mla::ForwardOp::args(problem));
      return false;
    } catch (const Error&) {
      return testing::count_unwritten(problem.out.view()) == problem.out.numel();
    }
  }));
}

TEST(Parallel, CountsBelowOneAreRefused) {
  for (const int count : {0, -1}) {
    testing::expect_error([count] { set_num_threads(count); }, ErrorCode::invalid_argument,
                          "set_num_threads: count: want 1 or more, got " + std::to_string(count));
  }
}

TEST(Parallel, ScratchIsMadeForWorkersThatRun) {
  const testing::Threads number(20000);
  const ThreadExecutor executor;
  EXPECT_EQ(scratch_of_workers<int>(executor, 3).size(), 3);
  EXPECT_EQ(scratch_of_workers<int>(executor, 0).size(), 0);
}

TEST(Parallel, WorkersAreNoMoreThanAMachineHas) {
  const testing::Threads number(20000);
  EXPECT_EQ(ThreadExecutor().workers(), ThreadExecutor::kMostWorkers);
  EXPECT_EQ(num_threads(), 20000);
}

TEST(Parallel, EveryIterationRunsOnce) {
  for (const int threads : {1, 2, 5}) {
    const testing::Threads number(threads);
    const ThreadExecutor executor;
    EXPECT_EQ(executor.workers(), threads);
    for (const std::int64_t count : {0, 1, 7, 1000}) {
      for (const std::int64_t grain : {1, 3, 2000}) {
        std::vector<std::atomic<int>> runs(static_cast<std::size_t>(count));
        std::vector<std::atomic<int>> busy(static_cast<std::size_t>(threads));
        std::atomic<int> wrong{0};
        executor.for_each_range(
            count, grain, [&](std::int64_t begin, std::int64_t end, int worker) {
              if (worker < 0 || worker >= threads || end - begin > grain || begin >= end) {
                ++wrong;
                return;
              }
              wrong += busy[worker]++ != 0;  // one range at a time
              for (std::int64_t i = begin; i < end; ++i) ++runs[i];
              --busy[worker];
            });
        EXPECT_EQ(wrong, 0);
        for (const std::atomic<int>& times : runs) EXPECT_EQ(times, 1);
      }
    }
  }
}

// After threads have run in the parent, a child of fork() may call every operation.
TEST(Parallel, OperationsWorkAfterFork) {
  const testing::Threads number(4);
  const auto run = [] {
    sparse_mla::TestProblem problem({.s_q = 40, .h_q = 8, .s_kv = 64, .topk = 32});
    sparse_mla::forward(sparse_mla::ForwardOp::args(problem));
    sparse_mla::distribution(sparse_mla::DistributionOp::args(problem));
    sparse_mla::backward(sparse_mla::BackwardOp::args(problem));
    return problem;
  };
  const sparse_mla::TestProblem expected = run();
  EXPECT_TRUE(in_child([&] {
    for (int repeat = 0; repeat < 3; ++repeat) {
      const sparse_mla::TestProblem problem = run();
      if (!testing::same_bytes(problem.out, expected.out) ||
          !testing::same_bytes(problem.attn_sum, expected.attn_sum) ||
          !testing::same_bytes(problem.dkv, expected.dkv)) {
        return false;
      }
    }
    return num_threads() == 4;
  }));
  // A child of the child too.
  EXPECT_TRUE(in_child([&] {
    run();
    return bool(in_child([&] { return testing::same_bytes(run().out, expected.out); }));
  }));
  // And the parent goes on as before.
  EXPECT_TRUE(testing::same_bytes(run().out, expected.out));
}

// Neither an exit nor another result: the threads that there are do the work of all.
TEST(Parallel, ThreadsThatCannotBeCreatedAreDoneWithout) {
  const testing::Threads number(6);
  const auto run = [] {
    sparse_mla::TestProblem problem({.s_q = 40, .h_q = 8, .s_kv = 64, .topk = 32});
    sparse_mla::forward(sparse_mla::ForwardOp::args(problem));
    sparse_mla::backward(sparse_mla::BackwardOp::args(problem));
    return problem;
  };
  const sparse_mla::TestProblem expected = run();
  for (const int left : {0, 1, 3}) {
    EXPECT_TRUE(in_child([&] {  // which has no thread yet
      g_threads_left = left;
      for (int repeat = 0; repeat < 3; ++repeat) {
        const sparse_mla::TestProblem problem = run();
        if (!testing::same_bytes(problem.out, expected.out) ||
            !testing::same_bytes(problem.dkv, expected.dkv)) {
          return false;
        }
      }
      return g_threads_left < 0;
    })) << left;
  }
}

// Ranks are threads that wait for each other: all of them, or an error.
TEST(Parallel, RanksWithoutThreadsAreAnError) {
  EXPECT_TRUE(in_child([] {
    g_threads_left = 1;
    try {
      expert_parallel::RankTeam team(3);
      return false;
    } catch (const Error& error) {
      return error.code() == ErrorCode::resource &&
             std::string(error.what())
                 .starts_with("expert_parallel: no thread for each of 3 ranks: ");
    }
  }));
}

// Large products allocate in the midst of a loop.
TEST(Parallel, MemoryThatRunsOutInALoopIsAnError) {
  for (const int threads : {1, 4}) {
    const testing::Threads number(threads);
    std::atomic<int> bodies{0};
    const auto body = [&](std::int64_t begin, std::int64_t, int) {
      ++bodies;
      if (begin == 3) throw std::bad_alloc();
    };
    EXPECT_THROW(ThreadExecutor().for_each_range(1 << 20, 1, body), std::bad_alloc);
    EXPECT_LT(bodies, 1 << 20) << "the loop went on";
    bodies = 0;
    ThreadExecutor().for_each_range(3, 1, body);
    EXPECT_EQ(bodies, 3);
  }
}

struct Interrupt {};
std::atomic<bool> g_interrupt{false};

void interrupt_this_process() {
  set_interrupt_hook([] {
    if (g_interrupt) throw Interrupt();
  });
}

// The program may want the end of a call on any of its threads, whoever works.
TEST(Parallel, AnInterruptEndsALoop) {
  interrupt_this_process();
  for (const int threads : {1, 4}) {
    const testing::Threads number(threads);
    const ThreadExecutor executor;
    std::atomic<int> ranges{0}, running{0};
    g_interrupt = true;
    EXPECT_THROW(
        executor.for_each_range(1 << 20, 1,
                                [&](std::int64_t, std::int64_t, int) {
                                  ++running;
                                  ++ranges;
                                  std::this_thread::sleep_for(std::chrono::milliseconds(1));
                                  --running;
                                }),
        Interrupt);
    EXPECT_EQ(running, 0) << "a worker went on after the error";
    EXPECT_LT(ranges, 1 << 20);
    g_interrupt = false;
    ranges = 0;
    ThreadExecutor().for_each_range(100, 1, [&](std::int64_t, std::int64_t, int) { ++ranges; });
    EXPECT_EQ(ranges, 100);
  }
  set_interrupt_hook(nullptr);
}

// Also where the calling thread has nothing left to do, and waits for a long range of another.
TEST(Parallel, AnInterruptEndsALongRangeOfAnotherWorker) {
  const testing::Threads number(2);
  interrupt_this_process();
  g_interrupt = false;
  const ThreadExecutor executor;
  std::atomic<bool> begun{false}, ended_early{false};
  const auto start = std::chrono::steady_clock::now();
  EXPECT_THROW(executor.for_each_range(
                   2, 1,
                   [&](std::int64_t, std::int64_t, int worker) {
                     while (worker == 0 && !begun) std::this_thread::yield();
                     begun = true;
                     if (worker == 0) return;
                     g_interrupt = true;
                     while (!executor.stopped() &&
                            std::chrono::steady_clock::now() - start < std::chrono::seconds(60)) {
                       std::this_thread::sleep_for(std::chrono::milliseconds(1));
                     }
                     ended_early = executor.stopped();
                   }),
               Interrupt);
  EXPECT_TRUE(ended_early);
  set_interrupt_hook(nullptr);
  g_interrupt = false;
}

// Calls from several threads at once have threads of their own, and all give them back.
TEST(Parallel, LoopsOfSeveralThreadsAtOnce) {
  const testing::Threads number(3);
  constexpr std::int64_t kCount = 500;
  std::atomic<int> wrong{0};
  const auto many_loops = [&] {
    for (int loop = 0; loop < 200; ++loop) {
      std::atomic<std::int64_t> sum{0};
      ThreadExecutor().for_each_range(kCount, 7, [&](std::int64_t begin, std::int64_t end, int) {
        for (std::int64_t i = begin; i < end; ++i) sum += i;
      });
      wrong += sum != kCount * (kCount - 1) / 2;
    }
  };
  const auto created = [] { return std::numeric_limits<int>::max() - g_threads_left; };
  const int at_first = created();
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) callers.emplace_back(many_loops);
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_LE(created() - at_first, 4 + 4 * 2);
}

}  // namespace
}  // namespace winnow
