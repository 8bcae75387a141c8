#include "winnow/core/parallel.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <new>
#include <string>
#include <thread>

#include <sched.h>

#include "winnow/core/error.h"
#include "winnow/core/executor.h"
#include "winnow/core/thread_team.h"

namespace winnow {
namespace {

std::atomic<int> g_num_threads{0};  // 0: not set

int threads_from_environment() {
  const char* text = std::getenv("WINNOW_NUM_THREADS");
  if (text == nullptr || *text == '\0') return 0;
  int count = 0;
  const char* end = text + std::strlen(text);
  const auto [stop, error] = std::from_chars(text, end, count);
  if (error != std::errc() || stop != end || count < 1) {
    throw Error(ErrorCode::invalid_argument, "num_threads", "WINNOW_NUM_THREADS",
                "a whole number of 1 or more", "\"" + std::string(text) + "\"");
  }
  return count;
}

// The first number of OMP_NUM_THREADS ("4" or "4,2"), which is what launchers such as torchrun set.
// 0 where there is none: as OpenMP does, anything else there is left out of account.
int threads_from_openmp() {
  const char* text = std::getenv("OMP_NUM_THREADS");
  if (text == nullptr) return 0;
  while (*text == ' ') ++text;
  int count = 0;
  std::from_chars(text, text + std::strlen(text), count);
  return std::max(0, count);
}

int processors_allowed() {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0) return CPU_COUNT(&allowed);
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

}  // namespace

int num_threads() {
  if (const int set = g_num_threads; set > 0) return set;
  if (const int environment = threads_from_environment(); environment > 0) return environment;
  if (const int openmp = threads_from_openmp(); openmp > 0) return openmp;
  return processors_allowed();
}

void set_num_threads(int count) {
  if (count < 1) {
    throw Error(ErrorCode::invalid_argument, "set_num_threads", "count", "1 or more",
                std::to_string(count));
  }
  g_num_threads = count;
}

ThreadExecutor::ThreadExecutor() : workers_(std::min(num_threads(), kMostWorkers)) {}

bool ThreadExecutor::stopped() const {
  if (!stopped_.load(std::memory_order_relaxed) && std::this_thread::get_id() == caller_) {
    try {
      interrupts_.look();
    } catch (...) {
      interrupt_ = std::current_exception();
      stopped_.store(true, std::memory_order_relaxed);
    }
  }
  return stopped_.load(std::memory_order_relaxed);
}

void ThreadExecutor::run(std::int64_t count, std::int64_t grain, RangeFunction function,
                         const void* context) const {
  std::atomic<std::int64_t> next{0};
  std::atomic<bool> out_of_memory{false};
  const auto work = [&](int worker) {
    try {
      while (!out_of_memory.load(std::memory_order_relaxed) && !stopped()) {
        const std::int64_t begin = next.fetch_add(grain, std::memory_order_relaxed);
        if (begin >= count) return;
        function(context, begin, std::min(begin + grain, count), worker);
      }
    } catch (const std::bad_alloc&) {  // large products of Eigen allocate
      out_of_memory = true;
    }
  };
  const std::int64_t ranges = (count + grain - 1) / grain;
  const int threads = static_cast<int>(std::min<std::int64_t>(workers_, ranges));
  if (threads <= 1) {
    work(0);
  } else {
    run_on_team(threads, std::ref(work), [this] { stopped(); });
  }
  if (interrupt_) std::rethrow_exception(interrupt_);
  if (out_of_memory) throw std::bad_alloc();
}

}  // namespace winnow
