// The benchmarks of paged_xl::attention: useful bytes are those of K and V, in fused mode also of
// r, each read once. The ceiling copies, which reads and writes: on the CPU as many bytes with the
// same threads, so that a kernel that only reads may be faster than its ceiling; on a GPU the rate
// of reading and writing together counts.
#include <algorithm>
#include <memory>
#include <numeric>

#include "winnow/paged_xl/cases.h"

namespace winnow::paged_xl {
namespace {

using testing::Random;
using testing::Target;

// A step whose blocks lie in random order.
struct BenchStep {
  Tensor query, key_cache, value_cache, bias, term, block_tables, context_lens, out, workspace;
  AttentionArgs args;

  BenchStep(const StepCase& shape, const Target& target) {
    const Device device = testing::device_of(target);
    const auto num_seqs = static_cast<std::int64_t>(shape.context_lens.size());
    const std::int64_t longest = std::ranges::max(shape.context_lens);
    const std::int64_t x = 16 / size_of(shape.dtype);
    const auto blocks_for = [&](std::int64_t tokens) {
      return (tokens + shape.block_size - 1) / shape.block_size;
    };
    Tensor lens(DType::i32, {num_seqs}), tables(DType::i32, {num_seqs, blocks_for(longest)});
    std::ranges::copy(shape.context_lens, lens.values<std::int32_t>().begin());
    std::int64_t num_blocks = 0;
    for (const std::int32_t length : shape.context_lens) num_blocks += blocks_for(length);
    std::vector<std::int32_t> order(static_cast<std::size_t>(num_blocks));
    std::iota(order.begin(), order.end(), 0);
    Random random(2);
    testing::shuffle(std::span(order), random);
    for (std::int64_t s = 0, next = 0; s < num_seqs; ++s) {
      for (std::int64_t b = 0; b < blocks_for(lens.view().at<std::int32_t>(s)); ++b) {
        tables.view().at<std::int32_t>(s, b) = order[static_cast<std::size_t>(next++)];
      }
    }
    block_tables = tables.to(device);
    context_lens = lens.to(device);

    const auto tensor = [&](std::initializer_list<std::int64_t> sizes) {
      return Tensor(shape.dtype, sizes, device);
    };
    query = tensor({num_seqs, shape.num_heads, shape.head_size});
    key_cache = tensor({num_blocks, shape.num_kv_heads, shape.head_size / x, shape.block_size, x});
    value_cache = tensor({num_blocks, shape.num_kv_heads, shape.head_size, shape.block_size});
    bias = tensor({shape.num_heads, shape.head_size});
    out = tensor({num_seqs, shape.num_heads, shape.head_size});
    term = shape.mode == Mode::plain ? tensor({num_seqs, shape.num_heads, longest})
                                     : tensor({shape.num_heads, longest, shape.head_size});
    for (Tensor* one : {&query, &key_cache, &value_cache, &bias, &term}) fill_pattern(*one);

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
    workspace = Tensor(DType::u8, {attention_workspace_bytes(args, target.options)}, device);
    args.workspace = workspace;
  }
};

testing::Benchmark make_benchmark(const StepCase& shape, DeviceType device = DeviceType::cpu) {
  const double per_token = double(shape.head_size) * double(size_of(shape.dtype));
  const double tokens = std::accumulate(shape.context_lens.begin(), shape.context_lens.end(), 0.0);
  double bytes = 2 * per_token * tokens * double(shape.num_kv_heads);
  if (shape.mode == Mode::fused) {
    bytes += per_token * double(std::ranges::max(shape.context_lens)) * double(shape.num_heads);
  }
  testing::Benchmark benchmark = make_copy_benchmark(shape.name, describe(shape), bytes, device);
  benchmark.prepare = [shape](const Target& target) -> std::function<void()> {
    auto step = std::make_shared<BenchStep>(shape, target);
    return [step, options = target.options] { attention(step->args, options); };
  };
  return benchmark;
}

const StepCase kLayer{.name = {}, .num_heads = 16, .num_kv_heads = 16, .head_size = 128};

StepCase equal_contexts(std::int64_t num_seqs, std::int32_t context_len) {
  StepCase shape = kLayer;
  shape.name = testing::numbered("s", num_seqs) + testing::numbered("-c", context_len);
  shape.context_lens.assign(static_cast<std::size_t>(num_seqs), context_len);
  return shape;
}

void add_for_cpu(std::vector<testing::Benchmark>& benchmarks) {
  constexpr DType f32 = DType::f32, f16 = DType::f16, bf16 = DType::bf16;
  std::vector<StepCase> promised, others;
  const StepCase many = equal_contexts(16, 2048), one = equal_contexts(1, 32768);
  StepCase grouped = many;
  grouped.name += "-kv2";
  grouped.num_kv_heads = 2;
  add(promised, {f32, bf16}, {Mode::plain}, many);
  add(promised, {f32, bf16}, {Mode::plain}, one);
  add(others, {f16}, {Mode::plain}, many);
  add(others, {bf16}, {Mode::plain}, grouped);
  add(others, {f32, bf16}, {Mode::fused}, many);
  add(others, {f32, bf16}, {Mode::fused}, one);
  for (const StepCase& shape : promised) {
    benchmarks.push_back(make_benchmark(shape));
    benchmarks.back().target = 0.5;
  }
  for (const StepCase& shape : others) benchmarks.push_back(make_benchmark(shape));
}

void add_for_gpu(std::vector<testing::Benchmark>& benchmarks) {
  constexpr DType f32 = DType::f32, f16 = DType::f16, bf16 = DType::bf16;
  StepCase ragged = kLayer;
  ragged.name = "s256-ragged";
  ragged.context_lens = ragged_contexts();
  StepCase grouped = equal_contexts(64, 4096);
  grouped.name += "-kv4";
  grouped.num_kv_heads = 4;
  std::vector<StepCase> batches, cold, others;
  for (const StepCase& shape : {equal_contexts(64, 4096), equal_contexts(8, 32768), ragged}) {
    add(batches, {bf16}, {Mode::plain, Mode::fused}, shape);
  }
  add(cold, {bf16}, {Mode::plain, Mode::fused}, equal_contexts(1, 8192));
  add(others, {f32, f16}, {Mode::plain, Mode::fused}, equal_contexts(64, 4096));
  add(others, {bf16}, {Mode::plain, Mode::fused}, grouped);
  add(others, {bf16}, {Mode::plain, Mode::fused}, equal_contexts(1, 131072));
  for (const StepCase& shape : batches) {
    benchmarks.push_back(make_benchmark(shape, DeviceType::cuda));
    if (shape.mode == Mode::plain) benchmarks.back().target = 0.85;
  }
  for (const StepCase& shape : cold) {
    benchmarks.push_back(make_benchmark(shape, DeviceType::cuda));
    benchmarks.back().cold = true;
    if (shape.mode == Mode::plain) benchmarks.back().target_seconds = 24e-6;
  }
  for (const StepCase& shape : others) {
    benchmarks.push_back(make_benchmark(shape, DeviceType::cuda));
  }
}

}  // namespace

std::vector<testing::Benchmark> attention_benchmarks() {
  std::vector<testing::Benchmark> benchmarks;
  add_for_cpu(benchmarks);
  add_for_gpu(benchmarks);
  return benchmarks;
}

}  // namespace winnow::paged_xl
