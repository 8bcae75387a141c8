// The benchmarks of paged_xl::position_term: useful bytes are those of r, read once, and of the
// term, written once; the ceiling copies as many.
#include <algorithm>
#include <memory>
#include <numeric>

#include "winnow/paged_xl/cases.h"

namespace winnow::paged_xl {
namespace {

using testing::Target;

struct BenchStep {
  Tensor query, bias, r, context_lens, matrix_bd;
};

constexpr std::int64_t kHeads = 16, kHeadSize = 128;

testing::Benchmark make_benchmark(DType dtype, const std::string& name,
                                  const std::vector<std::int32_t>& context_lens,
                                  DeviceType device = DeviceType::cpu) {
  const StepCase shape{.name = {},
                       .num_heads = kHeads,
                       .num_kv_heads = kHeads,
                       .head_size = kHeadSize,
                       .context_lens = context_lens};
  const auto num_seqs = static_cast<std::int64_t>(context_lens.size());
  const std::int64_t longest = std::ranges::max(context_lens);
  const double tokens = std::accumulate(context_lens.begin(), context_lens.end(), 0.0);
  const DType term_dtype = device == DeviceType::cpu ? DType::f32 : dtype;
  testing::Benchmark benchmark = make_copy_benchmark(
      std::string(to_string(dtype)) + "-" + name, describe(shape),
      double(kHeads) * (double(longest) * double(kHeadSize) * double(size_of(dtype)) +
                        tokens * double(size_of(term_dtype))),
      device);
  benchmark.prepare = [=](const Target& target) -> std::function<void()> {
    const Device where = testing::device_of(target);
    auto step = std::make_shared<BenchStep>(BenchStep{
        Tensor(dtype, {num_seqs, kHeads, kHeadSize}, where),
        Tensor(dtype, {kHeads, kHeadSize}, where),
        Tensor(dtype, {kHeads, longest, kHeadSize}, where), Tensor(DType::i32, {num_seqs}),
        Tensor(term_dtype, {num_seqs, kHeads, longest}, where)});
    for (Tensor* tensor : {&step->query, &step->bias, &step->r}) fill_pattern(*tensor);
    std::ranges::copy(context_lens, step->context_lens.values<std::int32_t>().begin());
    step->context_lens = step->context_lens.to(where);
    return [step, options = target.options] {
      position_term({.query = step->query,
                     .pos_bias_v = step->bias,
                     .r = step->r,
                     .context_lens = step->context_lens,
                     .matrix_bd = step->matrix_bd},
                    options);
    };
  };
  return benchmark;
}

}  // namespace

std::vector<testing::Benchmark> position_term_benchmarks() {
  std::vector<testing::Benchmark> list;
  const auto add = [&](DType dtype, std::int64_t num_seqs, std::int32_t context_len,
                       DeviceType device) {
    list.push_back(make_benchmark(
        dtype, testing::numbered("s", num_seqs) + testing::numbered("-c", context_len),
        std::vector<std::int32_t>(static_cast<std::size_t>(num_seqs), context_len), device));
  };
  for (const DType dtype : {DType::f32, DType::bf16}) {
    add(dtype, 16, 2048, DeviceType::cpu);
    add(dtype, 1, 32768, DeviceType::cpu);
  }
  add(DType::bf16, 64, 4096, DeviceType::cuda);
  add(DType::bf16, 8, 32768, DeviceType::cuda);
  list.push_back(make_benchmark(DType::bf16, "s256-ragged", ragged_contexts(), DeviceType::cuda));
  add(DType::bf16, 1, 8192, DeviceType::cuda);
  add(DType::f32, 64, 4096, DeviceType::cuda);
  return list;
}

}  // namespace winnow::paged_xl
