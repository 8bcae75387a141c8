// The case table of expert_parallel::low_latency. Every comparison is of bits.

#include "winnow/expert_parallel/memory/layouts.h"
#include "winnow/expert_parallel/rendezvous/launch_environment.h"
#include "winnow/expert_parallel/testing/low_latency_problem.h"
#include "winnow/expert_parallel/testing/ranks.h"
#include "winnow/testing/table.h"

namespace winnow::expert_parallel {

std::vector<testing::Benchmark> low_latency_benchmarks();  // low_latency_bench.cc

namespace {

std::vector<LowLatencyProblem> make_problems() {
  std::vector<LowLatencyProblem> list;
  for (const int world : {1, 2, 3, 4, 6, 8}) {
    const std::string ranks = std::to_string(world) + "-ranks";
    list.push_back({.name = ranks, .world = world});
    list.push_back({.name = ranks + "-bf16-halves",
                    .world = world,
                    .hidden = 72,
                    .format = RowFormat::bf16,
                    .halves = true,
                    .rounds = 4});
  }
  list.push_back({.name = "power-of-two-by-column",
                  .format = RowFormat::fp8_power_of_two,
                  .wide_indices = true,
                  .scales_by_column = true,
                  .halves = true});
  list.push_back({.name = "ue8m0",
                  .hidden = 1024,
                  .format = RowFormat::fp8_ue8m0,
                  .scales_by_column = true,
                  .shrink = true});
  list.push_back({.name = "fewer-columns", .topk = 4, .given_topk = 2, .wide_indices = true});
  list.push_back({.name = "no-experts", .choice = ExpertChoice::none});
  list.push_back({.name = "all-to-all-experts",
                  .world = 2,
                  .experts_per_rank = 4,
                  .topk = 8,
                  .max_tokens = 40,
                  .hidden = 128,
                  .choice = ExpertChoice::distinct,
                  .full = true});
  // More than one turn of a block's threads over a row, and of its loads over a token's experts;
  // rows in several parts.
  LowLatencyProblem wide{.name = "wide-fp8",
                         .world = 2,
                         .experts_per_rank = 8,
                         .topk = 11,
                         .max_tokens = 2,
                         .hidden = 16640,
                         .format = RowFormat::fp8,
                         .choice = ExpertChoice::distinct,
                         .rounds = 1};
  list.push_back(wide);
  wide.format = RowFormat::bf16;
  wide.name = "wide-bf16", wide.shrink = true;
  list.push_back(wide);
  // Many rows of a token that are sent without their sum.
  wide.name = "wide-halves", wide.shrink = false, wide.halves = true;
  list.push_back(wide);
  list.push_back({.name = "parts-halves",
                  .world = 3,
                  .experts_per_rank = 4,
                  .max_tokens = 3,
                  .hidden = 4224,
                  .format = RowFormat::bf16,
                  .halves = true,
                  .rounds = 2});
  for (const bool shrink : {false, true}) {
    list.push_back({.name = shrink ? "newest-first-shrink" : "newest-first",
                    .halves = true,
                    .newest_first = true,
                    .shrink = shrink,
                    .rounds = 4});
  }
  list.push_back({.name = "many-experts",
                  .experts_per_rank = 64,
                  .topk = 8,
                  .max_tokens = 16,
                  .hidden = 128,
                  .shrink = true});
  return list;
}

testing::CaseOutcome run_case(const LowLatencyProblem& problem, const testing::Target& target) {
  LowLatencyConfig config = problem.config();
  config.device = testing::device_of(target);
  config.backend = target.options.backend;
  if (config.device.type == DeviceType::cuda) config.timeout = std::chrono::seconds(10);
  const std::vector<LowLatencyRound> rounds = make_rounds(problem);
  const auto part = [&](const std::shared_ptr<Transport>& transport,
                        const std::shared_ptr<Store>& store, Device device) {
    config.device = device;
    LowLatency layer(transport, store, config);
    return run_rank(layer, problem, rounds);
  };
  if (launch_environment().has_value()) return run_launched(target.device, part).outcome();
  RankTeam team(problem.world);
  return compare_on_ranks(team,
                          [&](int, const std::shared_ptr<Transport>& transport) {
                            return part(transport, team.world().store(), config.device);
                          })
      .outcome();
}

}  // namespace

testing::Operation low_latency_operation() {
  const std::vector<LowLatencyProblem> problems = make_problems();
  testing::Operation operation{"expert_parallel::low_latency",
                               "dispatch and combine of few tokens, without counts",
                               testing::cases_of(problems, run_case), low_latency_benchmarks()};
  for (std::size_t i = 0; i < problems.size(); ++i) {
    operation.cases[i].ranks = problems[i].world;
    operation.cases[i].on_gpu = problems[i].world <= kMostRanksOnGpu;
  }
  return operation;
}

}  // namespace winnow::expert_parallel
