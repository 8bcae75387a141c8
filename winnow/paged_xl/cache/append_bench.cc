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
testing::Benchmark make_benchmark(DType dtype, std::int64_t num_tokens,
                                  DeviceType device = DeviceType::cpu) {
  constexpr std::int64_t kHeads = 16, kHeadSize = 128, kBlockSize = 16;
  testing::Benchmark benchmark =
      make_copy_benchmark(std::string(to_string(dtype)) + testing::numbered("-t", num_tokens),
                          testing::numbered("num_tokens ", num_tokens) +
                              ", num_kv_heads 16, head_size 128, block_size 16",
                          2.0 * double(num_tokens * kHeads * kHeadSize * size_of(dtype)), device);
  benchmark.prepare = [=](const Target& target) -> std::function<void()> {
    const std::int64_t blocks = num_tokens / kBlockSize, x = 16 / size_of(dtype);
    const Device where = testing::device_of(target);
    auto cache = std::make_shared<BenchCache>(BenchCache{
        Tensor(dtype, {num_tokens, kHeads, kHeadSize}, where),
        Tensor(dtype, {num_tokens, kHeads, kHeadSize}, where), Tensor(DType::i64, {num_tokens}),
        Tensor(dtype, {blocks, kHeads, kHeadSize / x, kBlockSize, x}, where),
        Tensor(dtype, {blocks, kHeads, kHeadSize, kBlockSize}, where)});
    testing::Random random(1);
    fill_pattern(cache->key);
    fill_pattern(cache->value);
    Tensor order(DType::i32, {blocks});
    testing::fill_distinct(order, random, blocks);
    for (std::int64_t t = 0; t < num_tokens; ++t) {
      const std::int64_t block = order.view().at<std::int32_t>(t / kBlockSize);
      cache->slots.view().at<std::int64_t>(t) = block * kBlockSize + t % kBlockSize;
    }
    cache->slots = cache->slots.to(where);
    return [cache, options = target.options] {
      append({cache->key, cache->value, cache->slots, cache->key_cache, cache->value_cache},
             options);
    };
  };
  return benchmark;
}

}  // namespace

std::vector<testing::Benchmark> append_benchmarks() {
  return {make_benchmark(DType::f32, 8192), make_benchmark(DType::bf16, 8192),
          make_benchmark(DType::f32, 65536, DeviceType::cuda),
          make_benchmark(DType::bf16, 65536, DeviceType::cuda)};
}

}  // namespace winnow::paged_xl
