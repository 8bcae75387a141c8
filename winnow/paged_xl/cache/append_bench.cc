// The benchmarks of paged_xl::append: useful bytes are those of the new keys and values; the
// ceiling copies as many.
#include <memory>

#include "winnow/paged_xl/cache/append.h"
#include "winnow/paged_xl/cases.h"

namespace winnow::paged_xl {
namespace {

using testing::Target;

struct BenchCache {
  Tensor key, value, slots, key_cache, value_cache;
};

// A prompt of one sequence whose blocks lie in random order.
testing::Benchmark make_benchmark(DType dtype, std::int64_t num_tokens) {
  constexpr std::int64_t kHeads = 16, kHeadSize = 128, kBlockSize = 16;
  testing::Benchmark benchmark =
      make_copy_benchmark(std::string(to_string(dtype)) + testing::numbered("-t", num_tokens),
                          testing::numbered("num_tokens ", num_tokens) +
                              ", num_kv_heads 16, head_size 128, block_size 16",
                          2.0 * double(num_tokens * kHeads * kHeadSize * size_of(dtype)));
  benchmark.prepare = [=](const Target& target) -> std::function<void()> {
    require_cpu("paged_xl::append", target);
    const std::int64_t blocks = num_tokens / kBlockSize, x = 16 / size_of(dtype);
    auto cache = std::make_shared<BenchCache>(
        BenchCache{Tensor(dtype, {num_tokens, kHeads, kHeadSize}),
                   Tensor(dtype, {num_tokens, kHeads, kHeadSize}), Tensor(DType::i64, {num_tokens}),
                   Tensor(dtype, {blocks, kHeads, kHeadSize / x, kBlockSize, x}),
                   Tensor(dtype, {blocks, kHeads, kHeadSize, kBlockSize})});
    testing::Random random(1);
    testing::fill_normal(cache->key, random);
    testing::fill_normal(cache->value, random);
    Tensor order(DType::i32, {blocks});
    testing::fill_distinct(order, random, blocks);
    for (std::int64_t t = 0; t < num_tokens; ++t) {
      const std::int64_t block = order.view().at<std::int32_t>(t / kBlockSize);
      cache->slots.view().at<std::int64_t>(t) = block * kBlockSize + t % kBlockSize;
    }
    return [cache, options = target.options] {
      append({cache->key, cache->value, cache->slots, cache->key_cache, cache->value_cache},
             options);
    };
  };
  return benchmark;
}

}  // namespace

std::vector<testing::Benchmark> append_benchmarks() {
  return {make_benchmark(DType::f32, 8192), make_benchmark(DType::bf16, 8192)};
}

}  // namespace winnow::paged_xl
