// The cases of the all-to-all whose point is combine.
#include "winnow/expert_parallel/testing/all_to_all_table.h"

namespace winnow::expert_parallel {

void add_combine_cases(CaseTable& table, World world) {
  using enum ExpertChoice;
  table.add(world, "weighted-bias",
            {.choice = duplicates, .weights = true, .weighted_combine = true, .bias = true});
  table.add(world, "local-combine", {.topk = 5, .choice = duplicates, .local_combine = true});
  table.add(world, "local-combine-weighted",
            {.topk = 3,
             .choice = dropped,
             .local_combine = true,
             .weights = true,
             .weighted_combine = true});
  // Rows are read with few SMs, and pushed with many.
  for (const int sms : {8, 24}) {
    table.add(world, "token-major-" + std::to_string(sms) + "-sms",
              {.topk = 3,
               .choice = dropped,
               .token_major = true,
               .local_combine = true,
               .sm_count = sms});
  }
  table.add(world, "pair-values",
            {.topk = 3,
             .choice = dropped,
             .bias = true,
             .second_bias = true,
             .combine_weights = true,
             .pair_values = true});
  table.add(world, "pair-values-token-major",
            {.topk = 5, .choice = duplicates, .token_major = true, .pair_values = true});
  table.add(world, "all-dropped", {.choice = none, .bias = true});
}

void add_combine_options(CaseTable& table, World world) {
  using enum ExpertChoice;
  using enum Mode;
  using enum ExpertRows;
  table.add(world, "own-rows", {.choice = dropped, .expert_rows = own});
  table.add(world, "in-place", {.choice = dropped, .expert_rows = in_place, .local_combine = true});
  table.add(world, "in-place-token-major", {.expert_rows = in_place, .token_major = true});
  table.add(world, "strided",
            {.choice = dropped,
             .expert_rows = own,
             .weights = true,
             .weighted_combine = true,
             .bias = true,
             .strided = true});
  table.add(world, "own-rows-copy-out",
            {.expert_rows = own, .local_combine = true, .copy_out = true});
  table.add(world, "one-expert-local-combine",
            {.topk = 7, .choice = one_expert, .local_combine = true});
  // Values of pairs, weights of combine, two biases.
  for (const int sms : {8, 24}) {
    table.add(world, "pair-values-pushed-" + std::to_string(sms) + "-sms",
              {.topk = 3,
               .choice = dropped,
               .token_major = true,
               .local_combine = true,
               .pair_values = true,
               .sm_count = sms});
  }
  table.add(world, "added-values",
            {.weight_dtype = DType::bf16,
             .topk = 4,
             .choice = dropped,
             .token_major = true,
             .pair_values = true,
             .add_values = true});
  table.add(world, "pair-values-f16",
            {.dtype = DType::f32,
             .weight_dtype = DType::f16,
             .topk = 3,
             .choice = duplicates,
             .expert_rows = own,
             .local_combine = true,
             .strided = true,
             .combine_weights = true,
             .pair_values = true});
  table.add(world, "pair-values-worst-case",
            {.choice = dropped, .mode = worst_case, .pair_values = true});
  table.add(world, "pair-values-copy-out-cached",
            {.mode = cached, .token_major = true, .copy_out = true, .pair_values = true});
  table.add(world, "combine-weights-bf16-aligned",
            {.weight_dtype = DType::bf16,
             .alignment = 4,
             .choice = dropped,
             .weights = true,
             .copy_out = true,
             .combine_weights = true});
  table.add(world, "two-biases",
            {.dtype = DType::f16,
             .token_major = true,
             .bias = true,
             .strided = true,
             .second_bias = true});
}

}  // namespace winnow::expert_parallel
