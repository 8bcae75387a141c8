// The ranks of a world as threads of this process, for tests, cases and benchmarks.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "winnow/expert_parallel/transport/in_process/in_process.h"

namespace winnow::expert_parallel {

using RankBody = std::function<void(int rank, const std::shared_ptr<Transport>& transport)>;

// One thread per rank, which waits between runs, and the world that they share. Throws Error
// (resource) where a thread cannot be created.
class RankTeam {
 public:
  explicit RankTeam(int world_size);
  ~RankTeam();
  RankTeam(const RankTeam&) = delete;
  RankTeam& operator=(const RankTeam&) = delete;

  InProcessWorld& world() { return world_; }

  // Runs the body on every rank and returns when all have ended: what each threw, or null.
  [[nodiscard]] std::vector<std::exception_ptr> try_run(const RankBody& body);
  // The same, and throws what the lowest rank threw. Timeouts are thrown only if there is nothing
  // else: ranks with other errors know the reason.
  void run(const RankBody& body);

 private:
  void work(int rank);
  void end();

  InProcessWorld world_;
  std::mutex mutex_;
  std::condition_variable changed_;
  const RankBody* body_ = nullptr;
  int runs_ = 0;     // begun so far
  int running_ = 0;  // ranks that have not ended the last run
  bool ended_ = false;
  std::vector<std::exception_ptr> thrown_;
  std::vector<std::thread> threads_;
};

}  // namespace winnow::expert_parallel
