// What attention() takes. Internal.
#pragma once

#include <tuple>

#include "winnow/paged_xl/attention/attention.h"
#include "winnow/paged_xl/attention/attention_impl.h"
#include "winnow/paged_xl/problem_contract.h"

namespace winnow::paged_xl {

// Checks both caches together and stores what they hold in params.cache.
void check_caches(const Check& check, const AttentionArgs& args, AttentionParams& params);
// Requires either matrix_bd, whose shape it checks, or pos_bias_v with r.
void check_position_term(const Check& check, const AttentionArgs& args);

struct AttentionTable {
  using Args = AttentionArgs;
  static constexpr const char* kOperation = "paged_xl::attention";
  static consteval auto entries() {
    using namespace contract;
    return std::tuple_cat(
        query<Args>(),
        std::tuple(input<&Args::key_cache>(
                       "[num_blocks, num_kv_heads=num_heads, head_size/x, block_size=16, x]",
                       as("query"), "x = 16 bytes / size of an element")
                       .by_rule(),
                   input<&Args::value_cache>(
                       "[num_blocks, num_kv_heads, head_size, block_size]", as("query"),
                       "head_size is 32, 64, 80, 96, 112, 128, 160, 192 or 256, "
                       "block_size 8, 16, 32, 64 or 128")
                       .by_rule(),
                   rule<check_caches>, pos_bias<&Args::pos_bias_u>("content bias"),
                   rule<check_position_term>,
                   input<&Args::matrix_bd>(
                       "[num_seqs, num_heads, columns]", follows("query", same, accumulator_of),
                       "the unscaled position term, as position_term() gives it; "
                       "columns past a context are not read")
                       .described(),
                   pos_bias<&Args::pos_bias_v>("position bias").template unless<&Args::matrix_bd>(),
                   relative<&Args::r>().template unless<&Args::matrix_bd>(),
                   input<&Args::block_tables>("[num_seqs, max_blocks_per_seq]", any_of(DType::i32),
                                              "the blocks of each sequence"),
                   context_lens<&Args::context_lens>(),
                   value<&Args::scale>("of the logits; 1 / sqrt(head_size) if None"),
                   rule<check_scale, &Args::scale, &Args::query>,
                   output<&Args::out>("[num_seqs, num_heads, head_size]", as("query")),
                   optional_output<&Args::lse>("[num_seqs, num_heads]", sums_of("query")),
                   scratch<&Args::workspace>()));
  }
};
inline constexpr contract::Contract<AttentionTable> kAttention;

}  // namespace winnow::paged_xl
