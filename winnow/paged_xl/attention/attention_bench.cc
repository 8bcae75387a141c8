// The benchmarks of paged_xl::attention: useful bytes are those of K and V, in fused mode also of
// r, each read once. The ceiling copies as many bytes with the same threads, which reads and writes
// them: a kernel that only reads may be faster than its ceiling.
#include <algorithm>
#include <cstring>
#include <memory>

#include "winnow/paged_xl/cases.h"

namespace winnow::paged_xl {
namespace {

using testing::Random;
using testing::Target;

// Random numbers without the time to make each of them: a pattern that repeats.
void fill_pattern(Tensor& tensor) {
  constexpr std::int64_t kPattern = (1 << 20) + 37;  // elements; in step with no block
  const std::int64_t count = std::min(kPattern, tensor.numel());
  Random random(1);
  testing::fill_normal(TensorView(tensor.data(), tensor.dtype(), {count}), random);
  auto* bytes = static_cast<char*>(tensor.data());
  for (std::int64_t done = count; done < tensor.numel(); done += count) {
    const std::int64_t size = size_of(tensor.dtype());
    std::memcpy(bytes + done * size, bytes,
                static_cast<std::size_t>(std::min(count, tensor.numel() - done) * size));
  }
}

// A step whose contexts are all equally long and fill their blocks, which lie in random order.
struct BenchStep {
  Tensor query, key_cache, value_cache, bias, term, block_tables, context_lens, out;
  AttentionArgs args;

  explicit BenchStep(const StepCase& shape) {
    const auto num_seqs = static_cast<std::int64_t>(shape.context_lens.size());
    const std::int64_t context_len = shape.context_lens[0], x = 16 / size_of(shape.dtype);
    const std::int64_t blocks = context_len / shape.block_size, num_blocks = num_seqs * blocks;
    query = Tensor(shape.dtype, {num_seqs, shape.num_heads, shape.head_size});
    key_cache = Tensor(shape.dtype,
                       {num_blocks, shape.num_kv_heads, shape.head_size / x, shape.block_size, x});
    value_cache =
        Tensor(shape.dtype, {num_blocks, shape.num_kv_heads, shape.head_size, shape.block_size});
    bias = Tensor(shape.dtype, {shape.num_heads, shape.head_size});
    out = Tensor(shape.dtype, {num_seqs, shape.num_heads, shape.head_size});
    term = shape.mode == Mode::plain
               ? Tensor(shape.dtype, {num_seqs, shape.num_heads, context_len})
               : Tensor(shape.dtype, {shape.num_heads, context_len, shape.head_size});
    for (Tensor* tensor : {&query, &key_cache, &value_cache, &bias, &term}) fill_pattern(*tensor);
    block_tables = Tensor(DType::i32, {num_seqs, blocks});
    Random random(2);
    testing::fill_distinct(TensorView(block_tables.data(), DType::i32, {num_blocks}), random,
                           num_blocks);
    context_lens = Tensor(DType::i32, {num_seqs});
    for (std::int32_t& length : context_lens.values<std::int32_t>()) length = shape.context_lens[0];

    args.query = query;
    args.key_cache = key_cache;
    args.value_cache = value_cache;
    args.pos_bias_u = bias;
    if (shape.mode == Mode::plain) {
      args.matrix_bd = term;
    } else {
      args.pos_bias_v = bias;
      args.r = term;
    }
    args.block_tables = block_tables;
    args.context_lens = context_lens;
    args.out = out;
  }
};

testing::Benchmark make_benchmark(const StepCase& shape, bool promised) {
  const double per_head =
      double(shape.context_lens[0]) * double(shape.head_size) * double(size_of(shape.dtype));
  double bytes = 2 * per_head * double(shape.context_lens.size()) * double(shape.num_kv_heads);
  if (shape.mode == Mode::fused) bytes += per_head * double(shape.num_heads);
  testing::Benchmark benchmark = make_copy_benchmark(shape.name, describe(shape), bytes);
  if (promised) benchmark.target = 0.5;
  benchmark.prepare = [shape](const Target& target) -> std::function<void()> {
    require_cpu("paged_xl::attention", target);
    auto step = std::make_shared<BenchStep>(shape);
    return [step, options = target.options] { attention(step->args, options); };
  };
  return benchmark;
}

}  // namespace

std::vector<testing::Benchmark> attention_benchmarks() {
  constexpr DType f32 = DType::f32, f16 = DType::f16, bf16 = DType::bf16;
  std::vector<StepCase> promised, others;
  const StepCase many{.name = "s16-c2048",
                      .num_heads = 16,
                      .num_kv_heads = 16,
                      .head_size = 128,
                      .context_lens = std::vector<std::int32_t>(16, 2048)};
  StepCase one = many;
  one.name = "s1-c32768";
  one.context_lens = {32768};
  StepCase grouped = many;
  grouped.name = "s16-c2048-kv2";
  grouped.num_kv_heads = 2;
  add(promised, {f32, bf16}, {Mode::plain}, many);
  add(promised, {f32, bf16}, {Mode::plain}, one);
  add(others, {f16}, {Mode::plain}, many);
  add(others, {bf16}, {Mode::plain}, grouped);
  add(others, {f32, bf16}, {Mode::fused}, many);
  add(others, {f32, bf16}, {Mode::fused}, one);
  std::vector<testing::Benchmark> benchmarks;
  for (const StepCase& shape : promised) benchmarks.push_back(make_benchmark(shape, true));
  for (const StepCase& shape : others) benchmarks.push_back(make_benchmark(shape, false));
  return benchmarks;
}

}  // namespace winnow::paged_xl
