// The threads of the ranks of a world.
#pragma once

#include <functional>
#include <memory>

namespace winnow::expert_parallel {

// One thread per rank, which waits between runs. Throws Error (resource) where a thread cannot be
// created.
class RankThreads {
 public:
  explicit RankThreads(int ranks);
  ~RankThreads();

  // Runs body(rank) on every thread and returns when all have ended. Nothing may leave the body.
  void run(const std::function<void(int rank)>& body);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace winnow::expert_parallel
