// The cases of the all-to-all whose point is dispatch.
#include "winnow/expert_parallel/testing/all_to_all_table.h"

namespace winnow::expert_parallel {

void add_dispatch_cases(CaseTable& table, World world) {
  using enum ExpertChoice;
  using enum Mode;
  table.add(world, "weights", {.choice = dropped, .weights = true});
  table.add(world, "aligned", {.alignment = 8, .choice = dropped, .weights = true});
  table.add(world, "token-major", {.topk = 4, .choice = duplicates, .token_major = true});
  table.add(world, "token-major-weights",
            {.topk = 3, .choice = dropped, .token_major = true, .weights = true, .bias = true});
  table.add(world, "cached",
            {.topk = 3,
             .choice = dropped,
             .mode = cached,
             .weights = true,
             .weighted_combine = true,
             .rounds = 3});
  table.add(world, "worst-case", {.choice = dropped, .mode = worst_case, .weights = true});
  // For which blocks send apart where ranks have GPUs of their own: taken in several slices, new
  // and repeated, and left; more scales of a row than a warp loads at once.
  table.add(world, "large-rows-taken",
            {.topk = 3,
             .max_tokens = world == World{1, 2} ? 1200 : 40,
             .hidden = 4096,
             .tokens = Tokens::full,
             .choice = dropped,
             .mode = cached,
             .token_major = true,
             .weights = true,
             .copy_out = true,
             .sm_count = 24});
  table.add(world, "large-rows-taken-fp8",
            {.max_tokens = 40,
             .hidden = 8320,
             .choice = one_expert,
             .token_major = true,
             .weights = true,
             .fp8 = true,
             .copy_out = true,
             .sm_count = 24});
  table.add(world, "large-rows-left",
            {.topk = 3,
             .max_tokens = 40,
             .hidden = 4096,
             .tokens = Tokens::even_ranks_empty,
             .choice = dropped,
             .mode = worst_case,
             .token_major = true,
             .weights = true,
             .sm_count = 24});
  table.add(world, "no-token", {.tokens = Tokens::none, .weights = true});
  table.add(world, "one-expert", {.choice = one_expert, .weights = true});
}

void add_dispatch_options(CaseTable& table, World world) {
  using enum ExpertChoice;
  using enum Mode;
  table.add(world, "fp8", {.hidden = 144, .choice = dropped, .weights = true, .fp8 = true});
  table.add(world, "fp8-token-major",
            {.topk = 3, .hidden = 256, .choice = duplicates, .token_major = true, .fp8 = true});
  table.add(world, "fp8-cached", {.hidden = 144, .mode = cached, .fp8 = true});
  table.add(world, "scatter-slice",
            {.topk = 3, .choice = dropped, .scatter = Scatter::slice, .weights = true});
  table.add(world, "scatter-table",
            {.topk = 3, .choice = duplicates, .scatter = Scatter::table, .local_combine = true});
  table.add(world, "scatter-table-uneven", {.choice = duplicates, .scatter = Scatter::table});
  table.add(world, "copy-out", {.choice = dropped, .weights = true, .copy_out = true});
  table.add(world, "copy-out-token-major", {.token_major = true, .copy_out = true});
  table.add(world, "wide-indices", {.choice = dropped, .strided = true, .wide_indices = true});
  table.add(world, "wide-indices-token-major",
            {.max_tokens = 70, .choice = duplicates, .token_major = true, .wide_indices = true});
  table.add(world, "copy-out-no-rows", {.choice = none, .token_major = true, .copy_out = true});
  table.add(world, "copy-out-cached-token-major",
            {.max_tokens = 70,
             .choice = dropped,
             .mode = cached,
             .token_major = true,
             .weights = true,
             .copy_out = true});
  table.add(world, "out", {.choice = dropped, .weights = true, .out = true});
  table.add(world, "out-token-major",
            {.topk = 3, .token_major = true, .weights = true, .out = true, .in_flight = true});
  table.add(world, "out-cached", {.alignment = 4, .mode = cached, .out = true});
  table.add(world, "out-worst-case-token-major",
            {.topk = 3, .mode = worst_case, .token_major = true, .out = true});
  table.add(world, "out-worst-case", {.mode = worst_case, .weights = true, .out = true});
  table.add(world, "out-strided-fp8",
            {.hidden = 144, .weights = true, .fp8 = true, .out = true, .strided = true});
  table.add(world, "strided-fp8",
            {.hidden = 144, .token_major = true, .weights = true, .fp8 = true, .strided = true});
  table.add(world, "growth", {.arena_rows = 4, .weights = true, .in_flight = true, .rounds = 4});
  table.add(world, "growth-cached",
            {.arena_rows = 4, .mode = cached, .in_flight = true, .rounds = 3});
  table.add(
      world, "cached-token-major",
      {.topk = 3, .choice = duplicates, .mode = cached, .token_major = true, .weights = true});
  table.add(world, "cached-aligned", {.alignment = 4, .mode = cached, .weights = true});
  table.add(world, "worst-case-token-major",
            {.topk = 3, .mode = worst_case, .token_major = true, .weights = true});
  table.add(world, "worst-case-aligned",
            {.alignment = 4, .choice = duplicates, .mode = worst_case});
  table.add(world, "empty-ranks", {.tokens = Tokens::even_ranks_empty, .weights = true});
  table.add(world, "empty-ranks-token-major",
            {.tokens = Tokens::even_ranks_empty, .token_major = true});
  table.add(world, "one-token", {.max_tokens = 1, .tokens = Tokens::full});
  table.add(world, "k1", {.topk = 1});
  table.add(world, "k32",
            {.experts_per_rank = 16,
             .topk = 32,
             .choice = duplicates,
             .weights = true,
             .weighted_combine = true});
  table.add(world, "one-expert-per-rank", {.experts_per_rank = 1, .topk = 3, .choice = duplicates});
  table.add(world, "narrow", {.hidden = 8, .choice = dropped});
  table.add(world, "wide", {.max_tokens = 3, .hidden = 7176});
  // More than one chunk of 64 tokens, with gaps between the runs.
  table.add(world, "chunks",
            {.topk = 1, .max_tokens = 600, .hidden = 8, .tokens = Tokens::full, .choice = dropped});
  table.add(world, "chunk-end",
            {.max_tokens = 512, .hidden = 8, .tokens = Tokens::full, .choice = one_expert});
  // Opaque scales.
  table.add(world, "scales-i32-by-column",
            {.hidden = 512,
             .fp8 = true,
             .scale_dtype = DType::i32,
             .scale_columns = 3,
             .scales_by_column = true});
  table.add(world, "scales-u8",
            {.hidden = 256,
             .token_major = true,
             .fp8 = true,
             .strided = true,
             .scale_dtype = DType::u8,
             .scale_columns = 8});
  table.add(world, "scales-u8-by-column",
            {.hidden = 256,
             .mode = cached,
             .fp8 = true,
             .scale_dtype = DType::u8,
             .scale_columns = 32,
             .scales_by_column = true});
}

}  // namespace winnow::expert_parallel
