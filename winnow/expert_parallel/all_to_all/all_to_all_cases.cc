// The case table of expert_parallel::all_to_all. Moving bytes and adding in a fixed order have no
// tolerance: every comparison is of bits.
#include <utility>

#include "winnow/expert_parallel/rendezvous/launch_environment.h"
#include "winnow/expert_parallel/testing/all_to_all_check.h"
#include "winnow/testing/table.h"

namespace winnow::expert_parallel {

std::vector<testing::Benchmark> all_to_all_benchmarks();

namespace {

using World = std::pair<int, int>;  // nodes and ranks per node

class Table {
 public:
  // Every world and option once more with the problem's own name: "2x2-f16-weights".
  void add(World world, const std::string& name, Problem problem) {
    problem.nodes = world.first;
    problem.local_world_size = world.second;
    problem.name = std::to_string(world.first) + "x" + std::to_string(world.second) + "-" + name;
    list_.push_back(std::move(problem));
  }
  std::vector<Problem> take() { return std::move(list_); }

 private:
  std::vector<Problem> list_;
};

constexpr World kOneRank{1, 1}, kOneNode{1, 4}, kTwoNodes{2, 2}, kRails{4, 1};

// What every world must do.
void add_common(Table& table, World world) {
  table.add(world, "plain", {});
  table.add(world, "weights", {.choice = ExpertChoice::dropped, .weights = true});
  table.add(world, "weighted-bias",
            {.choice = ExpertChoice::duplicates,
             .weights = true,
             .weighted_combine = true,
             .bias = true});
  table.add(world, "local-combine",
            {.topk = 5, .choice = ExpertChoice::duplicates, .local_combine = true});
  table.add(world, "local-combine-weighted",
            {.topk = 3,
             .choice = ExpertChoice::dropped,
             .local_combine = true,
             .weights = true,
             .weighted_combine = true});
  table.add(world, "aligned", {.alignment = 8, .choice = ExpertChoice::dropped, .weights = true});
  table.add(world, "token-major",
            {.topk = 4, .choice = ExpertChoice::duplicates, .token_major = true});
  table.add(world, "token-major-weights",
            {.topk = 3,
             .choice = ExpertChoice::dropped,
             .token_major = true,
             .weights = true,
             .bias = true});
  // Rows are read with few SMs, and pushed with many.
  for (const int sms : {8, 24}) {
    table.add(world, "token-major-" + std::to_string(sms) + "-sms",
              {.topk = 3,
               .choice = ExpertChoice::dropped,
               .token_major = true,
               .local_combine = true,
               .sm_count = sms});
  }
  table.add(world, "cached",
            {.topk = 3,
             .choice = ExpertChoice::dropped,
             .mode = Mode::cached,
             .weights = true,
             .weighted_combine = true,
             .rounds = 3});
  table.add(world, "worst-case",
            {.choice = ExpertChoice::dropped, .mode = Mode::worst_case, .weights = true});
  table.add(world, "no-token", {.tokens = Tokens::none, .weights = true});
  table.add(world, "pair-values",
            {.topk = 3,
             .choice = ExpertChoice::dropped,
             .bias = true,
             .second_bias = true,
             .combine_weights = true,
             .pair_values = true});
  table.add(
      world, "pair-values-token-major",
      {.topk = 5, .choice = ExpertChoice::duplicates, .token_major = true, .pair_values = true});
  table.add(world, "one-expert", {.choice = ExpertChoice::one_expert, .weights = true});
  table.add(world, "all-dropped", {.choice = ExpertChoice::none, .bias = true});
}

// Values of pairs, weights of combine, two biases, opaque scales.
void add_values(Table& table, World world) {
  for (const int sms : {8, 24}) {
    table.add(world, "pair-values-pushed-" + std::to_string(sms) + "-sms",
              {.topk = 3,
               .choice = ExpertChoice::dropped,
               .token_major = true,
               .local_combine = true,
               .pair_values = true,
               .sm_count = sms});
  }
  table.add(world, "added-values",
            {.weight_dtype = DType::bf16,
             .topk = 4,
             .choice = ExpertChoice::dropped,
             .token_major = true,
             .pair_values = true,
             .add_values = true});
  table.add(world, "pair-values-f16",
            {.dtype = DType::f32,
             .weight_dtype = DType::f16,
             .topk = 3,
             .choice = ExpertChoice::duplicates,
             .expert_rows = ExpertRows::own,
             .local_combine = true,
             .strided = true,
             .combine_weights = true,
             .pair_values = true});
  table.add(world, "pair-values-worst-case",
            {.choice = ExpertChoice::dropped, .mode = Mode::worst_case, .pair_values = true});
  table.add(world, "pair-values-copy-out-cached",
            {.mode = Mode::cached, .token_major = true, .copy_out = true, .pair_values = true});
  table.add(world, "combine-weights-bf16-aligned",
            {.weight_dtype = DType::bf16,
             .alignment = 4,
             .choice = ExpertChoice::dropped,
             .weights = true,
             .copy_out = true,
             .combine_weights = true});
  table.add(world, "two-biases",
            {.dtype = DType::f16,
             .token_major = true,
             .bias = true,
             .strided = true,
             .second_bias = true});
  table.add(world, "scales-i32-by-column",
            {.hidden = 512,
             .fp8 = true,
             .scale_dtype = DType::i32,
             .scale_columns = 3,
             .scales_by_column = true});
  table.add(world, "scales-u8",
            {.hidden = 256,
             .token_major = true,
             .fp8 = true,
             .strided = true,
             .scale_dtype = DType::u8,
             .scale_columns = 8});
  table.add(world, "scales-u8-by-column",
            {.hidden = 256,
             .mode = Mode::cached,
             .fp8 = true,
             .scale_dtype = DType::u8,
             .scale_columns = 32,
             .scales_by_column = true});
}

void add_options(Table& table, World world) {
  for (const DType dtype : {DType::f32, DType::f16}) {
    const std::string name(to_string(dtype));
    table.add(world, name, {.dtype = dtype, .choice = ExpertChoice::dropped});
    table.add(world, name + "-local-combine-bias",
              {.dtype = dtype,
               .topk = 6,
               .choice = ExpertChoice::duplicates,
               .local_combine = true,
               .bias = true});
  }
  for (const DType dtype : {DType::bf16, DType::f16}) {
    const std::string name = std::string(to_string(dtype)) + "-weights";
    table.add(world, name,
              {.weight_dtype = dtype,
               .topk = 3,
               .choice = ExpertChoice::dropped,
               .weights = true,
               .weighted_combine = true});
    table.add(world, name + "-token-major",
              {.weight_dtype = dtype,
               .topk = 3,
               .choice = ExpertChoice::dropped,
               .token_major = true,
               .weights = true});
  }
  table.add(world, "fp8",
            {.hidden = 144, .choice = ExpertChoice::dropped, .weights = true, .fp8 = true});
  table.add(world, "fp8-token-major",
            {.topk = 3,
             .hidden = 256,
             .choice = ExpertChoice::duplicates,
             .token_major = true,
             .fp8 = true});
  table.add(world, "fp8-cached", {.hidden = 144, .mode = Mode::cached, .fp8 = true});
  table.add(
      world, "scatter-slice",
      {.topk = 3, .choice = ExpertChoice::dropped, .scatter = Scatter::slice, .weights = true});
  table.add(world, "scatter-table",
            {.topk = 3,
             .choice = ExpertChoice::duplicates,
             .scatter = Scatter::table,
             .local_combine = true});
  table.add(world, "scatter-table-uneven",
            {.choice = ExpertChoice::duplicates, .scatter = Scatter::table});
  table.add(world, "copy-out",
            {.choice = ExpertChoice::dropped, .weights = true, .copy_out = true});
  table.add(world, "copy-out-token-major", {.token_major = true, .copy_out = true});
  table.add(world, "out", {.choice = ExpertChoice::dropped, .weights = true, .out = true});
  table.add(world, "out-token-major",
            {.topk = 3, .token_major = true, .weights = true, .out = true, .in_flight = true});
  table.add(world, "out-cached", {.alignment = 4, .mode = Mode::cached, .out = true});
  table.add(world, "out-worst-case", {.mode = Mode::worst_case, .weights = true, .out = true});
  table.add(world, "out-strided-fp8",
            {.hidden = 144, .weights = true, .fp8 = true, .out = true, .strided = true});
  table.add(world, "own-rows", {.choice = ExpertChoice::dropped, .expert_rows = ExpertRows::own});
  table.add(world, "in-place",
            {.choice = ExpertChoice::dropped,
             .expert_rows = ExpertRows::in_place,
             .local_combine = true});
  table.add(world, "in-place-token-major",
            {.expert_rows = ExpertRows::in_place, .token_major = true});
  table.add(world, "strided",
            {.choice = ExpertChoice::dropped,
             .expert_rows = ExpertRows::own,
             .weights = true,
             .weighted_combine = true,
             .bias = true,
             .strided = true});
  table.add(world, "strided-fp8",
            {.hidden = 144, .token_major = true, .weights = true, .fp8 = true, .strided = true});
  table.add(world, "own-rows-copy-out",
            {.expert_rows = ExpertRows::own, .local_combine = true, .copy_out = true});
  table.add(world, "in-flight",
            {.choice = ExpertChoice::dropped, .weights = true, .in_flight = true, .rounds = 4});
  table.add(world, "in-flight-token-major",
            {.token_major = true, .copy_out = true, .in_flight = true, .rounds = 3});
  table.add(world, "growth", {.arena_rows = 4, .weights = true, .in_flight = true, .rounds = 4});
  table.add(world, "growth-cached",
            {.arena_rows = 4, .mode = Mode::cached, .in_flight = true, .rounds = 3});
  table.add(world, "cached-token-major",
            {.topk = 3,
             .choice = ExpertChoice::duplicates,
             .mode = Mode::cached,
             .token_major = true,
             .weights = true});
  table.add(world, "cached-aligned", {.alignment = 4, .mode = Mode::cached, .weights = true});
  table.add(world, "worst-case-token-major",
            {.topk = 3, .mode = Mode::worst_case, .token_major = true, .weights = true});
  table.add(world, "worst-case-aligned",
            {.alignment = 4, .choice = ExpertChoice::duplicates, .mode = Mode::worst_case});
  table.add(world, "empty-ranks", {.tokens = Tokens::even_ranks_empty, .weights = true});
  table.add(world, "empty-ranks-token-major",
            {.tokens = Tokens::even_ranks_empty, .token_major = true});
  table.add(world, "one-expert-local-combine",
            {.topk = 7, .choice = ExpertChoice::one_expert, .local_combine = true});
  table.add(world, "one-token", {.max_tokens = 1, .tokens = Tokens::full});
  table.add(world, "k1", {.topk = 1});
  table.add(world, "k32",
            {.experts_per_rank = 16,
             .topk = 32,
             .choice = ExpertChoice::duplicates,
             .weights = true,
             .weighted_combine = true});
  table.add(world, "one-expert-per-rank",
            {.experts_per_rank = 1, .topk = 3, .choice = ExpertChoice::duplicates});
  table.add(world, "narrow", {.hidden = 8, .choice = ExpertChoice::dropped});
  table.add(world, "wide", {.max_tokens = 3, .hidden = 7176});
  // More than one chunk of 64 tokens, with gaps between the runs.
  table.add(world, "chunks",
            {.topk = 1,
             .max_tokens = 600,
             .hidden = 8,
             .tokens = Tokens::full,
             .choice = ExpertChoice::dropped});
  table.add(
      world, "chunk-end",
      {.max_tokens = 512, .hidden = 8, .tokens = Tokens::full, .choice = ExpertChoice::one_expert});
}

std::vector<Problem> make_problems() {
  Table table;
  for (const World& world :
       {kOneRank, World{1, 2}, World{2, 1}, kOneNode, kTwoNodes, kRails, World{2, 3}}) {
    add_common(table, world);
  }
  for (const World& world : {kOneNode, kTwoNodes}) {
    add_options(table, world);
    add_values(table, world);
  }
  table.add(kRails, "chunks",
            {.topk = 1,
             .max_tokens = 600,
             .hidden = 8,
             .tokens = Tokens::full,
             .choice = ExpertChoice::dropped});
  table.add(kRails, "in-flight",
            {.choice = ExpertChoice::dropped, .weights = true, .in_flight = true, .rounds = 4});
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
              p.choice = ExpertChoice::dropped;
            }));
  table.add(kExample, "local-combine", with([](Problem& p) { p.local_combine = true; }));
  table.add(kExample, "token-major", with([](Problem& p) { p.token_major = p.weights = true; }));
  table.add(kExample, "cached", with([](Problem& p) { p.mode = Mode::cached; }));
  table.add(kExample, "fp8-copy-out", with([](Problem& p) { p.fp8 = p.copy_out = true; }));
  return table.take();
}

testing::CaseOutcome run_case(const Problem& problem, const testing::Target& target) {
  const std::optional<Backend> forced = target.options.backend;
  const Comparisons comparisons = launch_environment().has_value()
                                      ? run_launched(problem, target.device, forced)
                                      : run_in_process(problem, testing::device_of(target), forced);
  // Where no call has run, the comparisons say why.
  return {comparisons.backend().value_or(Backend::cpu), comparisons.list()};
}

}  // namespace

testing::Operation all_to_all_operation() {
  const std::vector<Problem> problems = make_problems();
  testing::Operation operation{"expert_parallel::all_to_all",
                               "dispatch of tokens to their experts' ranks, and combine",
                               testing::cases_of(problems, run_case), all_to_all_benchmarks()};
  for (std::size_t i = 0; i < problems.size(); ++i) {
    operation.cases[i].ranks = problems[i].world_size();
    operation.cases[i].on_gpu = problems[i].world_size() <= kMostRanksOnOneGpu;
  }
  return operation;
}

}  // namespace winnow::expert_parallel
