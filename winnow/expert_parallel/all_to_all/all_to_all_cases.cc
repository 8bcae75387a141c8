// The case table of expert_parallel::all_to_all: the worlds and the cases of the layer; those of
// its operations are in their rooms. Moving bytes and adding in a fixed order have no tolerance:
// every comparison is of bits.
#include "winnow/expert_parallel/memory/layouts.h"
#include "winnow/expert_parallel/rendezvous/launch_environment.h"
#include "winnow/expert_parallel/testing/all_to_all_check.h"
#include "winnow/expert_parallel/testing/all_to_all_table.h"
#include "winnow/testing/table.h"

namespace winnow::expert_parallel {

std::vector<testing::Benchmark> all_to_all_benchmarks();

namespace {

constexpr World kOneRank{1, 1}, kOneNode{1, 4}, kTwoNodes{2, 2}, kRails{4, 1};

void add_common(CaseTable& table, World world) {
  table.add(world, "plain", {});
  add_dispatch_cases(table, world);
  add_combine_cases(table, world);
}

void add_options(CaseTable& table, World world) {
  using enum ExpertChoice;
  for (const DType dtype : {DType::f32, DType::f16}) {
    const std::string name(to_string(dtype));
    table.add(world, name, {.dtype = dtype, .choice = dropped});
    table.add(
        world, name + "-local-combine-bias",
        {.dtype = dtype, .topk = 6, .choice = duplicates, .local_combine = true, .bias = true});
  }
  for (const DType dtype : {DType::bf16, DType::f16}) {
    const std::string name = std::string(to_string(dtype)) + "-weights";
    table.add(world, name,
              {.weight_dtype = dtype,
               .topk = 3,
               .choice = dropped,
               .weights = true,
               .weighted_combine = true});
    table.add(world, name + "-token-major",
              {.weight_dtype = dtype,
               .topk = 3,
               .choice = dropped,
               .token_major = true,
               .weights = true});
  }
  table.add(world, "in-flight",
            {.choice = dropped, .weights = true, .in_flight = true, .rounds = 4});
  table.add(world, "in-flight-token-major",
            {.token_major = true, .copy_out = true, .in_flight = true, .rounds = 3});
  add_dispatch_options(table, world);
  add_combine_options(table, world);
}

std::vector<Problem> make_problems() {
  using enum ExpertChoice;
  using enum Mode;
  CaseTable table;
  for (const World& world :
       {kOneRank, World{1, 2}, World{2, 1}, kOneNode, kTwoNodes, kRails, World{2, 3}}) {
    add_common(table, world);
  }
  for (const World& world : {kOneNode, kTwoNodes}) {
    add_options(table, world);
  }
  table.add(kRails, "chunks",
            {.topk = 1, .max_tokens = 600, .hidden = 8, .tokens = Tokens::full, .choice = dropped});
  table.add(kRails, "in-flight",
            {.choice = dropped, .weights = true, .in_flight = true, .rounds = 4});
  // The topology of the example: 4 nodes of 8 ranks, 256 experts, 8 per token.
  constexpr World kExample{4, 8};
  const Problem example{.experts_per_rank = 8, .topk = 8, .max_tokens = 8, .hidden = 16};
  const auto with = [&](auto change) {
    Problem problem = example;
    change(problem);
    return problem;
  };
  table.add(kExample, "plain", example);
  table.add(kExample, "weights", with([](Problem& p) {
              p.weights = p.weighted_combine = p.bias = true;
              p.choice = dropped;
            }));
  table.add(kExample, "local-combine", with([](Problem& p) { p.local_combine = true; }));
  table.add(kExample, "token-major", with([](Problem& p) { p.token_major = p.weights = true; }));
  table.add(kExample, "cached", with([](Problem& p) { p.mode = cached; }));
  table.add(kExample, "fp8-copy-out", with([](Problem& p) { p.fp8 = p.copy_out = true; }));
  return table.take();
}

testing::CaseOutcome run_case(const Problem& problem, const testing::Target& target) {
  const std::optional<Backend> forced = target.options.backend;
  const auto part = [&](const std::shared_ptr<Transport>& transport,
                        const std::shared_ptr<Store>& store, Device device) {
    Config config = problem.config();
    config.device = device;
    config.backend = forced;
    AllToAll layer(transport, store, config);
    return run_rank(layer, problem, make_rounds(problem));
  };
  return (launch_environment().has_value()
              ? run_launched(target.device, part)
              : run_in_process(problem, testing::device_of(target), forced))
      .outcome();
}

}  // namespace

testing::Operation all_to_all_operation() {
  const std::vector<Problem> problems = make_problems();
  testing::Operation operation{"expert_parallel::all_to_all",
                               "dispatch of tokens to their experts' ranks, and combine",
                               testing::cases_of(problems, run_case), all_to_all_benchmarks()};
  for (std::size_t i = 0; i < problems.size(); ++i) {
    operation.cases[i].ranks = problems[i].world_size();
    operation.cases[i].on_gpu = problems[i].world_size() <= kMostRanksOnGpu;
  }
  return operation;
}

}  // namespace winnow::expert_parallel
