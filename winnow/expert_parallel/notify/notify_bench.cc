// The benchmarks of expert_parallel::notify: all ranks as threads of one process, kCalls calls per
// run, so that waking the threads does not count. Useful bytes are those of is_token_in_rank; what
// takes the time are two rounds of messages.
#include <memory>

#include "winnow/expert_parallel/testing/notify_problem.h"
#include "winnow/expert_parallel/testing/ranks.h"
#include "winnow/testing/table.h"

namespace winnow::expert_parallel {
namespace {

using testing::Target;

constexpr int kCalls = 100;

struct BenchRank {
  NotifyInputs inputs;
  NotifyOutputs outputs;
  std::unique_ptr<Notifier> notifier;
};

struct BenchWorld {
  explicit BenchWorld(int world_size) : team(world_size) {}
  RankTeam team;
  std::vector<BenchRank> ranks;
};

testing::Benchmark make_benchmark(int nodes, int local_world_size) {
  const NotifyShape shape{.nodes = nodes,
                          .local_world_size = local_world_size,
                          .experts_per_rank = 256 / (nodes * local_world_size),
                          .topk = 8,
                          .most_tokens = 4096,
                          .even = true,
                          .channels = 12};
  testing::Benchmark benchmark;
  benchmark.name = std::to_string(nodes) + "x" + std::to_string(local_world_size) + "-100-calls";
  benchmark.shape = describe(shape);
  benchmark.bytes = double(kCalls) * shape.ranks() * shape.ranks() * double(shape.most_tokens);
  benchmark.prepare = [=](const Target& target) -> std::function<void()> {
    testing::require_cpu("expert_parallel::notify", target);
    testing::Random random(1);
    const std::vector<Tensor> indices = make_indices(shape, random);
    auto world = std::make_shared<BenchWorld>(shape.ranks());
    for (const Tensor& table : indices) {
      world->ranks.push_back({NotifyInputs(shape, table), NotifyOutputs(shape), nullptr});
    }
    const auto of = [world](int rank) -> BenchRank& {
      return world->ranks[static_cast<std::size_t>(rank)];
    };
    world->team.run([&](int rank, const std::shared_ptr<Transport>& transport) {
      of(rank).notifier =
          std::make_unique<Notifier>(transport, world->team.world().store(), shape.config());
    });
    return [world, of, shape] {
      world->team.run([&](int rank, const std::shared_ptr<Transport>&) {
        BenchRank& mine = of(rank);
        for (int call = 0; call < kCalls; ++call) {
          mine.notifier->notify(make_args(shape, mine.inputs, mine.outputs));
        }
      });
    };
  };
  return benchmark;
}

}  // namespace

std::vector<testing::Benchmark> notify_benchmarks() {
  return {make_benchmark(1, 2), make_benchmark(2, 2), make_benchmark(4, 8)};
}

}  // namespace winnow::expert_parallel
