// The benchmarks of expert_parallel::layout: useful bytes are those of the indices and of
// is_token_in_rank. Counting has no ceiling of its own; the copy shows what memory would allow.
#include <memory>
#include <string>
#include <utility>

#include "winnow/expert_parallel/layout/layout.h"
#include "winnow/expert_parallel/testing/expert_choice.h"
#include "winnow/testing/table.h"

namespace winnow::expert_parallel {
namespace {

using testing::Target;

struct BenchLayout {
  Tensor indices, per_rank, per_node, per_expert, in_rank;
};

testing::Benchmark make_benchmark(std::string name, std::int64_t tokens, std::int64_t nodes,
                                  std::int64_t local_world_size, DeviceType device) {
  constexpr std::int64_t kTopk = 8, kExperts = 256;
  constexpr std::int64_t kGpuCopy = std::int64_t{4} << 30;  // the rate of the memory, not of the L2
  const std::int64_t ranks = nodes * local_world_size;
  testing::Benchmark benchmark;
  benchmark.name = std::move(name);
  benchmark.shape = "n " + std::to_string(tokens) + ", K 8, E 256, W " + std::to_string(ranks) +
                    ", L " + std::to_string(local_world_size);
  benchmark.bytes = double(tokens * (4 * kTopk + ranks));
  benchmark.ceiling.kind = testing::Ceiling::Kind::copy;
  benchmark.ceiling.bytes =
      device == DeviceType::cpu ? static_cast<std::int64_t>(benchmark.bytes) : kGpuCopy;
  benchmark.device = device;
  benchmark.prepare = [=](const Target& target) -> std::function<void()> {
    const Device where = testing::device_of(target);
    auto tensors = std::make_shared<BenchLayout>(BenchLayout{
        distinct_experts(0, tokens, kTopk, kExperts).to(where), Tensor(DType::i32, {ranks}, where),
        Tensor(DType::i32, {nodes}, where), Tensor(DType::i32, {kExperts}, where),
        Tensor(DType::u8, {tokens, ranks}, where)});
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
  return {make_benchmark("w8", 4096, 1, 8, DeviceType::cpu),
          make_benchmark("w32", 4096, 4, 8, DeviceType::cpu),
          make_benchmark("t4096-w32", 4096, 4, 8, DeviceType::cuda),
          make_benchmark("t1048576-w32", 1 << 20, 4, 8, DeviceType::cuda)};
}

}  // namespace winnow::expert_parallel
