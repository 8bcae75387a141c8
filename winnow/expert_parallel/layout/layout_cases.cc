// The case table of expert_parallel::layout. Counts have no tolerance.
#include "winnow/expert_parallel/layout/layout.h"
#include "winnow/expert_parallel/layout/layout_contract.h"
#include "winnow/expert_parallel/layout/layout_oracle.h"
#include "winnow/expert_parallel/testing/expert_choice.h"
#include "winnow/testing/repeated.h"
#include "winnow/testing/strided.h"
#include "winnow/testing/table.h"

namespace winnow::expert_parallel {

std::vector<testing::Benchmark> layout_benchmarks();

namespace {

using testing::CaseOutcome;
using testing::Target;

struct LayoutCase {
  std::string name;
  std::int64_t num_tokens = 37, topk = 4, experts = 16, world_size = 4, local_world_size = 2;
  ExpertChoice choice = ExpertChoice::dropped;
  testing::Layout strides = testing::Layout::dense;
};

std::vector<LayoutCase> make_cases() {
  std::vector<LayoutCase> list;
  for (const auto& [name, choice] :
       {std::pair("distinct", ExpertChoice::distinct), std::pair("dropped", ExpertChoice::dropped),
        std::pair("duplicates", ExpertChoice::duplicates),
        std::pair("one-expert", ExpertChoice::one_expert), std::pair("none", ExpertChoice::none)}) {
    list.push_back({.name = name, .choice = choice});
  }
  list.push_back({.name = "one-rank", .world_size = 1, .local_world_size = 1});
  list.push_back({.name = "one-node", .local_world_size = 4});
  list.push_back({.name = "nodes-of-one", .local_world_size = 1});
  list.push_back({.name = "nodes-of-3", .experts = 18, .world_size = 9, .local_world_size = 3});
  list.push_back({.name = "expert-per-rank", .experts = 4});
  list.push_back({.name = "more-experts-than-shared-memory-holds", .experts = 16384});
  list.push_back({.name = "no-token", .num_tokens = 0});
  list.push_back({.name = "one-token", .num_tokens = 1});
  list.push_back({.name = "k1", .topk = 1});
  list.push_back({.name = "k32", .topk = 32, .experts = 64});
  list.push_back({.name = "wide", .strides = testing::Layout::wide});
  list.push_back({.name = "reversed", .strides = testing::Layout::reversed});
  list.push_back({.name = "broadcast", .strides = testing::Layout::broadcast});
  list.push_back({.name = "example",
                  .num_tokens = 500,
                  .topk = 8,
                  .experts = 256,
                  .world_size = 32,
                  .local_world_size = 8});
  list.push_back({.name = "nodes-of-72",
                  .topk = 8,
                  .experts = 288,
                  .world_size = 144,
                  .local_world_size = 72});
  return list;
}

std::string describe(const LayoutCase& shape) {
  return "n " + std::to_string(shape.num_tokens) + ", K " + std::to_string(shape.topk) + ", E " +
         std::to_string(shape.experts) + ", W " + std::to_string(shape.world_size) + ", L " +
         std::to_string(shape.local_world_size);
}

CaseOutcome run_case(const LayoutCase& shape, const Target& target) {
  const Device device = testing::device_of(target);
  testing::Random random(testing::seed_from(shape.name));
  constexpr testing::Gaps kGaps{.dense = 1, .length = 1};
  const auto indices =
      testing::make_tensor(DType::i32, {shape.num_tokens, shape.topk}, shape.strides, kGaps);
  choose_experts(indices.view, random, shape.experts, shape.choice);
  const auto counts = [&](std::int64_t size) {
    return testing::on(device, testing::make_output(DType::i32, {size}, testing::Layout::dense));
  };
  const auto per_rank = counts(shape.world_size), per_expert = counts(shape.experts);
  const auto per_node = counts(shape.world_size / shape.local_world_size);
  const auto in_rank = testing::on(
      device,
      testing::make_output(DType::u8, {shape.num_tokens, shape.world_size}, shape.strides, kGaps));
  const auto indices_there = testing::on(device, indices);
  CaseOutcome outcome;
  outcome.backend = layout({.expert_indices = indices_there.view,
                            .experts = shape.experts,
                            .world_size = shape.world_size,
                            .local_world_size = shape.local_world_size,
                            .tokens_per_rank = per_rank.view,
                            .tokens_per_node = per_node.view,
                            .tokens_per_expert = per_expert.view,
                            .is_token_in_rank = in_rank.view},
                           target.options);
  const oracle::Layout expected =
      oracle::layout(indices.view, shape.experts, shape.world_size, shape.local_world_size);
  constexpr testing::Tolerance kExact{0, testing::RelativeTo::nothing};
  const auto compare = [&](std::string_view what, const testing::StridedTensor& there,
                           const std::vector<double>& values) {
    testing::compare_output(outcome, what, testing::on({}, there), values, kExact);
  };
  compare("tokens_per_rank", per_rank, expected.tokens_per_rank);
  compare("tokens_per_node", per_node, expected.tokens_per_node);
  compare("tokens_per_expert", per_expert, expected.tokens_per_expert);
  compare("is_token_in_rank", in_rank, expected.is_token_in_rank);
  return outcome;
}

}  // namespace

testing::Operation layout_operation() {
  const auto on_gpu = [](const LayoutCase&) { return true; };
  return {"expert_parallel::layout", "tokens per rank, node and expert",
          testing::cases_of<LayoutCase>(make_cases(), run_case, on_gpu), layout_benchmarks(),
          testing::repeated(kLayout, layout)};
}

}  // namespace winnow::expert_parallel
