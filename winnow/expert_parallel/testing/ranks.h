// The ranks of a world as threads of this process, for tests, cases and benchmarks.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <vector>

#include "winnow/expert_parallel/testing/rank_threads.h"
#include "winnow/expert_parallel/transport/in_process/in_process.h"

namespace winnow::expert_parallel {

using RankBody = std::function<void(int rank, const std::shared_ptr<Transport>& transport)>;

// One thread per rank, which waits between runs, and the world that they share. Throws Error
// (resource) where a thread cannot be created.
class RankTeam {
 public:
  explicit RankTeam(int world_size);

  InProcessWorld& world() { return world_; }

  // Runs the body on every rank and returns when all have ended: what each threw, or null.
  [[nodiscard]] std::vector<std::exception_ptr> try_run(const RankBody& body);
  // The same, and throws what the lowest rank threw. Timeouts are thrown only if there is nothing
  // else: ranks with other errors know the reason.
  void run(const RankBody& body);

 private:
  InProcessWorld world_;
  std::vector<std::shared_ptr<Transport>> transports_;
  RankThreads threads_;
};

}  // namespace winnow::expert_parallel
