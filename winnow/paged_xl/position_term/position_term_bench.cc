// The benchmarks of paged_xl::position_term: useful bytes are those of r, read once, and of the
// term, written once; the ceiling copies as many.
#include <memory>

#include "winnow/paged_xl/cases.h"

namespace winnow::paged_xl {
namespace {

using testing::Target;

struct BenchStep {
  Tensor query, bias, r, context_lens, matrix_bd;
};

testing::Benchmark make_benchmark(DType dtype, std::int64_t num_seqs, std::int32_t context_len) {
  constexpr std::int64_t kHeads = 16, kHeadSize = 128;
  const StepCase shape{
      .name = {},
      .num_heads = kHeads,
      .num_kv_heads = kHeads,
      .head_size = kHeadSize,
      .context_lens = std::vector<std::int32_t>(static_cast<std::size_t>(num_seqs), context_len)};
  testing::Benchmark benchmark =
      make_copy_benchmark(std::string(to_string(dtype)) + testing::numbered("-s", num_seqs) +
                              testing::numbered("-c", context_len),
                          describe(shape),
                          double(kHeads) * double(context_len) *
                              double(kHeadSize * size_of(dtype) + num_seqs * size_of(DType::f32)));
  benchmark.prepare = [=](const Target& target) -> std::function<void()> {
    require_cpu("paged_xl::position_term", target);
    auto step = std::make_shared<BenchStep>(
        BenchStep{Tensor(dtype, {num_seqs, kHeads, kHeadSize}), Tensor(dtype, {kHeads, kHeadSize}),
                  Tensor(dtype, {kHeads, context_len, kHeadSize}), Tensor(DType::i32, {num_seqs}),
                  Tensor(DType::f32, {num_seqs, kHeads, context_len})});
    testing::Random random(1);
    for (Tensor* tensor : {&step->query, &step->bias, &step->r}) {
      testing::fill_normal(*tensor, random);
    }
    for (std::int32_t& length : step->context_lens.values<std::int32_t>()) length = context_len;
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
  return {make_benchmark(DType::f32, 16, 2048), make_benchmark(DType::f32, 1, 32768),
          make_benchmark(DType::bf16, 16, 2048), make_benchmark(DType::bf16, 1, 32768)};
}

}  // namespace winnow::paged_xl
