// The case table of expert_parallel::notify: all ranks as threads, three calls in a row. Counts
// have no tolerance.
#include "winnow/expert_parallel/memory/layouts.h"
#include "winnow/expert_parallel/testing/notify_problem.h"
#include "winnow/expert_parallel/testing/ranks.h"
#include "winnow/testing/table.h"

namespace winnow::expert_parallel {

std::vector<testing::Benchmark> notify_benchmarks();

namespace {

using testing::CaseOutcome;
using testing::Comparison;
using testing::Target;

std::vector<NotifyShape> make_cases() {
  std::vector<NotifyShape> list;
  list.push_back({.name = "1x1"});
  list.push_back({.name = "1x4", .local_world_size = 4});
  list.push_back({.name = "2x2", .nodes = 2, .local_world_size = 2});
  list.push_back({.name = "4x1", .nodes = 4});
  list.push_back({.name = "3x3", .nodes = 3, .local_world_size = 3, .experts_per_rank = 1});
  list.push_back({.name = "4x8",
                  .nodes = 4,
                  .local_world_size = 8,
                  .experts_per_rank = 8,
                  .topk = 8,
                  .most_tokens = 100,
                  .channels = 10});
  const NotifyShape two{.nodes = 2, .local_world_size = 2};
  const auto add = [&](std::string name, const auto& change) {
    list.push_back(two);
    list.back().name = std::move(name);
    change(list.back());
  };
  add("no-token", [](NotifyShape& shape) { shape.most_tokens = 0; });
  add("one-token", [](NotifyShape& shape) { shape.most_tokens = 1; });
  add("more-channels-than-tokens", [](NotifyShape& shape) { shape.channels = 97; });
  add("one-channel", [](NotifyShape& shape) { shape.channels = 1; });
  add("aligned", [](NotifyShape& shape) { shape.expert_alignment = 16; });
  add("duplicates", [](NotifyShape& shape) { shape.choice = ExpertChoice::duplicates; });
  add("one-expert", [](NotifyShape& shape) { shape.choice = ExpertChoice::one_expert; });
  add("none", [](NotifyShape& shape) { shape.choice = ExpertChoice::none; });
  add("wide", [](NotifyShape& shape) { shape.strides = testing::Layout::wide; });
  add("reversed", [](NotifyShape& shape) { shape.strides = testing::Layout::reversed; });
  return list;
}

// The first that failed, else the first.
void merge(std::vector<Comparison>& all, std::vector<Comparison> of_rank, int rank) {
  for (Comparison& comparison : of_rank) {
    comparison.detail = "rank " + std::to_string(rank) + ": " + comparison.detail;
  }
  if (all.empty()) {
    all = std::move(of_rank);
    return;
  }
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i].passed && !of_rank[i].passed) all[i] = std::move(of_rank[i]);
  }
}

CaseOutcome run_case(const NotifyShape& shape, const Target& target) {
  const Device device = testing::device_of(target);
  NotifierConfig config = shape.config();
  config.device = device;
  config.backend = target.options.backend;
  constexpr int kCalls = 3;
  testing::Random random(testing::seed_from(shape.name));
  std::vector<std::vector<Tensor>> indices;
  for (int call = 0; call < kCalls; ++call) indices.push_back(make_indices(shape, random));
  std::vector<std::vector<Comparison>> found(static_cast<std::size_t>(shape.ranks() * kCalls));
  std::vector<Backend> ran(found.size());
  RankTeam team(shape.ranks());
  team.run([&](int rank, const std::shared_ptr<Transport>& transport) {
    const RankDevice place(device);
    Notifier notifier(transport, team.world().store(), config);
    for (int call = 0; call < kCalls; ++call) {
      const std::vector<Tensor>& table = indices[static_cast<std::size_t>(call)];
      NotifyInputs inputs(shape, table[static_cast<std::size_t>(rank)]);
      NotifyOutputs outputs(shape);
      ran[static_cast<std::size_t>(rank * kCalls + call)] =
          notify_at(place, notifier, make_args(shape, inputs, outputs), inputs, outputs);
      found[static_cast<std::size_t>(rank * kCalls + call)] =
          compare(shape, table, rank, outputs, notifier.totals()).comparisons;
    }
  });
  CaseOutcome outcome;
  for (std::size_t i = 0; i < found.size(); ++i) {
    merge(outcome.comparisons, std::move(found[i]), static_cast<int>(i) / kCalls);
  }
  outcome.backend = ran[0];
  for (const Backend backend : ran) {
    if (backend == outcome.backend) continue;
    outcome.comparisons.push_back(
        {"backend", 1, 0, false,
         std::string(to_string(ran[0])) + " and " + std::string(to_string(backend))});
  }
  return outcome;
}

}  // namespace

testing::Operation notify_operation() {
  const std::vector<NotifyShape> shapes = make_cases();
  testing::Operation operation{"expert_parallel::notify", "every rank learns what comes to it",
                               testing::cases_of(shapes, run_case), notify_benchmarks()};
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    operation.cases[i].on_gpu = shapes[i].ranks() <= kMostRanksOnGpu;
  }
  return operation;
}

}  // namespace winnow::expert_parallel
