// What simulated programs have in the place of winnow/expert_parallel/testing/rank_threads.cc:
// ranks take turns.
#include "winnow/expert_parallel/testing/rank_threads.h"

#include "winnow/simulator/launch.h"

namespace winnow::expert_parallel {

struct RankThreads::State {
  int ranks;
};

RankThreads::RankThreads(int ranks) : state_(std::make_unique<State>(ranks)) {}
RankThreads::~RankThreads() = default;

void RankThreads::run(const std::function<void(int)>& body) {
  simulator::run_hosts(state_->ranks, body);
}

}  // namespace winnow::expert_parallel
