// The benchmarks of expert_parallel::layout: useful bytes are those of the indices and of
// is_token_in_rank. Counting has no ceiling of its own; the copy shows what memory would allow.
#include <memory>

#include "winnow/expert_parallel/layout/layout.h"
#include "winnow/expert_parallel/testing/expert_choice.h"
#include "winnow/testing/table.h"

namespace winnow::expert_parallel {
namespace {

using testing::Target;

struct BenchLayout {
  Tensor indices, per_rank, per_node, per_expert, in_rank;
};

testing::Benchmark make_benchmark(std::int64_t nodes, std::int64_t local_world_size) {
  constexpr std::int64_t kTokens = 4096, kTopk = 8, kExperts = 256;
  const std::int64_t ranks = nodes * local_world_size;
  testing::Benchmark benchmark;
  benchmark.name = testing::numbered("w", ranks);
  benchmark.shape =
      "n 4096, K 8, E 256, W " + std::to_string(ranks) + ", L " + std::to_string(local_world_size);
  benchmark.ceiling.kind = testing::Ceiling::Kind::copy;
  benchmark.ceiling.bytes = kTokens * (4 * kTopk + ranks);
  benchmark.bytes = double(benchmark.ceiling.bytes);
  benchmark.prepare = [=](const Target& target) -> std::function<void()> {
    testing::require_cpu("expert_parallel::layout", target);
    auto tensors = std::make_shared<BenchLayout>(
        BenchLayout{Tensor(DType::i32, {kTokens, kTopk}), Tensor(DType::i32, {ranks}),
                    Tensor(DType::i32, {nodes}), Tensor(DType::i32, {kExperts}),
                    Tensor(DType::u8, {kTokens, ranks})});
    testing::Random random(1);
    choose_experts(tensors->indices, random, kExperts, ExpertChoice::distinct);
    return [=, options = target.options] {
      layout({.expert_indices = tensors->indices,
              .experts = kExperts,
              .world_size = ranks,
              .local_world_size = local_world_size,
              .tokens_per_rank = tensors->per_rank,
              .tokens_per_node = tensors->per_node,
              .tokens_per_expert = tensors->per_expert,
              .is_token_in_rank = tensors->in_rank},
             options);
    };
  };
  return benchmark;
}

}  // namespace

std::vector<testing::Benchmark> layout_benchmarks() {
  return {make_benchmark(1, 8), make_benchmark(4, 8)};
}

}  // namespace winnow::expert_parallel
