#include "winnow/core/parallel.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include <pthread.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "winnow/core/error.h"
#include "winnow/core/executor.h"

namespace winnow {
namespace {

std::atomic<int> g_num_threads{0};  // 0: not set

// GNU's OpenMP runtime hangs in the child of a process that had already used it.
std::atomic<bool> g_forked{false};
const int g_fork_handler = pthread_atfork(nullptr, nullptr, [] { g_forked = true; });

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

int default_threads() {
#ifdef _OPENMP
  if (!g_forked) return omp_get_max_threads();
#endif
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

}  // namespace

int num_threads() {
  const int set = g_num_threads;
  if (set > 0) return set;
  const int environment = threads_from_environment();
  return environment > 0 ? environment : default_threads();
}

void set_num_threads(int count) {
  if (count < 1) {
    throw Error(ErrorCode::invalid_argument, "set_num_threads", "count", "1 or more",
                std::to_string(count));
  }
  g_num_threads = count;
}

const char* parallel_runtime() {
#ifdef _OPENMP
  return _OPENMP >= 201811 ? "OpenMP 5.0 or newer" : "OpenMP 4.5";
#else
  return "plain threads";
#endif
}

ThreadExecutor::ThreadExecutor() : workers_(num_threads()) {}

void ThreadExecutor::run(std::int64_t count, std::int64_t grain, RangeFunction function,
                         const void* context) const {
  std::atomic<std::int64_t> next{0};
  const auto work = [&](int worker) {
    for (;;) {
      const std::int64_t begin = next.fetch_add(grain, std::memory_order_relaxed);
      if (begin >= count) return;
      function(context, begin, std::min(begin + grain, count), worker);
    }
  };
  const std::int64_t ranges = (count + grain - 1) / grain;
  const int threads = static_cast<int>(std::min<std::int64_t>(workers_, ranges));
  if (threads <= 1) return work(0);
#ifdef _OPENMP
  if (!g_forked) {
#pragma omp parallel num_threads(threads)
    work(omp_get_thread_num());
    return;
  }
#endif
  std::vector<std::thread> team;
  team.reserve(static_cast<std::size_t>(threads - 1));
  for (int worker = 1; worker < threads; ++worker) team.emplace_back(work, worker);
  work(0);
  for (std::thread& member : team) member.join();
}

}  // namespace winnow
