#include "winnow/expert_parallel/testing/rank_threads.h"

#include <condition_variable>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "winnow/core/error.h"

namespace winnow::expert_parallel {

struct RankThreads::State {
  std::mutex mutex;
  std::condition_variable changed;
  const std::function<void(int)>* body = nullptr;
  int runs = 0;     // begun so far
  int running = 0;  // ranks that have not ended the last run
  bool ended = false;
  std::vector<std::thread> threads;

  ~State() {
    {
      const std::lock_guard lock(mutex);
      ended = true;
    }
    changed.notify_all();
    for (std::thread& thread : threads) thread.join();
  }
  void work(int rank) {
    std::unique_lock lock(mutex);
    for (int done = 0;; ++done) {
      changed.wait(lock, [&] { return ended || runs > done; });
      if (runs == done) return;
      const std::function<void(int)>& run = *body;
      lock.unlock();
      run(rank);
      lock.lock();
      if (--running == 0) changed.notify_all();
    }
  }
};

RankThreads::RankThreads(int ranks) : state_(std::make_unique<State>()) {
  try {
    for (int rank = 0; rank < ranks; ++rank) {
      state_->threads.emplace_back([state = state_.get(), rank] { state->work(rank); });
    }
  } catch (const std::system_error& error) {
    throw Error(ErrorCode::resource, "expert_parallel",
                "no thread for each of " + std::to_string(ranks) + " ranks: " + error.what());
  }
}

RankThreads::~RankThreads() = default;

void RankThreads::run(const std::function<void(int)>& body) {
  std::unique_lock lock(state_->mutex);
  state_->body = &body;
  state_->running = static_cast<int>(state_->threads.size());
  ++state_->runs;
  state_->changed.notify_all();
  state_->changed.wait(lock, [&] { return state_->running == 0; });
}

}  // namespace winnow::expert_parallel
