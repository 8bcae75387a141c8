// The case table of paged_xl::attention.
#include <utility>

#include "winnow/paged_xl/attention/attention_contract.h"
#include "winnow/paged_xl/attention/attention_oracle.h"
#include "winnow/paged_xl/cases.h"
#include "winnow/testing/repeated.h"

namespace winnow::paged_xl {

std::vector<testing::Benchmark> attention_benchmarks();

namespace {

using testing::CaseOutcome;
using testing::numbered;
using testing::Target;

std::vector<StepCase> make_cases() {
  constexpr DType f32 = DType::f32, f16 = DType::f16, bf16 = DType::bf16;
  constexpr Mode plain = Mode::plain, fused = Mode::fused;
  std::vector<StepCase> list;
  // Sizes.
  for (const std::int64_t head_size : {32, 64, 80, 96, 112, 128, 160, 192, 256}) {
    add(list, {f32, f16, bf16}, {plain, fused},
        {.name = numbered("d", head_size), .head_size = head_size});
  }
  for (const std::int64_t block_size : {8, 32, 64, 128}) {
    add(list, {f32, f16, bf16}, {plain, fused},
        {.name = numbered("b", block_size),
         .block_size = block_size,
         .context_lens = {1, 131, 0, 128, 8}});
  }
  for (const auto& [heads, kv_heads] : {std::pair{1, 1}, {8, 8}, {8, 1}, {6, 3}, {16, 2}}) {
    add(list, {f32, bf16}, {plain, fused},
        {.name = numbered("h", heads) + numbered("-kv", kv_heads),
         .num_heads = heads,
         .num_kv_heads = kv_heads});
  }
  // Contexts.
  add(list, {f32, bf16}, {plain, fused}, {.name = "no-context", .context_lens = {0, 0, 0}});
  add(list, {f32, bf16}, {plain, fused},
      {.name = "no-block-no-column", .context_lens = {0, 0}, .spare = 0});
  add(list, {f32, bf16}, {plain, fused}, {.name = "no-sequence", .context_lens = {}});
  add(list, {f32, bf16}, {plain, fused}, {.name = "one-token", .context_lens = {1}});
  add(list, {f32, bf16}, {plain, fused},
      {.name = "splits", .context_lens = {511, 512, 513, 1024, 1025, 1600, 3}});
  add(list, {f32, bf16}, {plain, fused},
      {.name = "c131072",
       .num_heads = 2,
       .num_kv_heads = 1,
       .head_size = 32,
       .context_lens = {131072 + 7, 5}});
  // One sequence alone, three tiles or more for each warp of a small GPU.
  add(list, {f32, bf16}, {plain, fused},
      {.name = "alone", .num_heads = 2, .num_kv_heads = 1, .context_lens = {900}});
  add(list, {f32, bf16}, {plain, fused},
      {.name = "alone-d256",
       .num_heads = 1,
       .num_kv_heads = 1,
       .head_size = 256,
       .context_lens = {900}});
  std::vector<std::int32_t> ragged;
  for (std::int32_t s = 0; s < 70; ++s) ragged.push_back(s * 37 % 90);
  add(list, {f32, f16, bf16}, {plain, fused},
      {.name = "s70", .head_size = 32, .context_lens = ragged});
  add(list, {f32, bf16}, {plain, fused}, {.name = "shared-blocks", .shared_blocks = true});
  add(list, {f32}, {plain, fused}, {.name = "nothing-spare", .spare = 0});
  // Memory.
  add(list, {f32, f16, bf16}, {plain, fused}, {.name = "wide", .layout = Layout::wide});
  add(list, {f32, bf16}, {plain, fused}, {.name = "reversed", .layout = Layout::reversed});
  // Values.
  add(list, {f32, f16, bf16}, {plain, fused}, {.name = "bias-per-seq", .bias_per_sequence = true});
  add(list, {f16}, {plain}, {.name = "bd-f16", .matrix_bd_dtype = f16});
  add(list, {bf16}, {plain}, {.name = "bd-bf16", .matrix_bd_dtype = bf16});
  add(list, {f32, bf16}, {plain}, {.name = "mask-some", .mask = Mask::some});
  add(list, {f32, bf16}, {plain}, {.name = "mask-all", .mask = Mask::all});
  add(list, {f32, bf16}, {plain, fused}, {.name = "scale", .scale = 0.02});
  add(list, {f32, bf16}, {plain, fused}, {.name = "large-logits", .query = 500});
  testing::add_f64(
      list, {"d32",          "d64",           "d80",           "d256",       "b8",
             "b128",         "h6-kv3",        "h16-kv2",       "no-context", "splits",
             "s70",          "shared-blocks", "nothing-spare", "wide",       "reversed",
             "bias-per-seq", "mask-some",     "mask-all",      "scale",      "large-logits"});
  return list;
}

CaseOutcome run_case(const StepCase& shape, const Target& target) {
  const Device device = testing::device_of(target);
  const Step host_step = make_step(shape);
  const Step step = host_step.on(device);
  AttentionArgs args = step.attention_args();
  const auto num_seqs = static_cast<std::int64_t>(shape.context_lens.size());
  const auto make_out = [&] {
    return testing::on(
        device,
        make_unaligned(shape.dtype, {num_seqs, shape.num_heads, shape.head_size}, shape.layout));
  };
  const StridedTensor there = make_out();
  const StridedTensor lse_there = testing::on(
      device,
      make_unaligned(accumulator_of(shape.dtype), {num_seqs, shape.num_heads}, shape.layout));
  args.out = there.view;
  args.lse = lse_there.view;

  CaseOutcome outcome;
  outcome.backend = attention(args, target.options);
  const StridedTensor out = testing::on({}, there), lse = testing::on({}, lse_there);
  const oracle::Attention expected = oracle::attention(host_step.attention_args());
  testing::compare_output(outcome, "out", out, expected.out,
                          tolerance(Quantity::out, shape.dtype, expected.largest_logit));
  testing::compare_output(outcome, "lse", lse, expected.lse,
                          tolerance(Quantity::lse, lse.view.dtype(), expected.largest_logit));

  const StridedTensor without_lse = make_out();
  args.out = without_lse.view;
  args.lse = {};
  attention(args, target.options);
  outcome.comparisons.push_back(
      testing::compare("out without lse", testing::on({}, without_lse).view,
                       testing::read(out.view), {0, testing::RelativeTo::nothing}));
  return outcome;
}

}  // namespace

testing::Operation attention_operation() {
  return {"paged_xl::attention", "decode attention with relative positions over a paged cache",
          testing::cases_of(make_cases(), run_case, testing::all_but_f64<StepCase>),
          attention_benchmarks(), testing::repeated(kAttention, attention)};
}

}  // namespace winnow::paged_xl
