// What step() takes. In a shape, "ring=8" says which size winnow.supports() assumes unless it is
// given one. The next rule<> checks an argument with by_rule(), and decides whether one with
// described() may be absent (core/contract_table.h). Internal.
#pragma once

#include <tuple>

#include "winnow/compressor/problem_contract.h"
#include "winnow/compressor/step/step.h"
#include "winnow/compressor/step/step_impl.h"

namespace winnow::compressor {

void check_state(const Check& check, const StepArgs& args);
// Checks the columns of `rows`, and where rows are stored: at least one of rows, cache and pages is
// given. Puts the cache or the pages, and the slots, into `params`.
void check_stored(const Check& check, const StepArgs& args, StepParams& params);

struct StepTable {
  using Args = StepArgs;
  static constexpr const char* kOperation = "compressor::step";
  static consteval auto entries() {
    using namespace contract;
    using enum DType;
    return std::tuple_cat(
        tokens<Args>(),
        std::tuple(
            input<&Args::first_position>("[n]", any_of(i32),
                                         "of the first new token of each sequence")
                .by_rule(),
            input<&Args::state_slots>("[n]", any_of(i32),
                                      "the index of each sequence's state; a sequence with a "
                                      "negative one is left out")
                .by_rule(),
            output<&Args::state>("[states, ring=8, 2 * columns=2*columns]", sums_of("kv"),
                                 "ring is at least the tokens of a window")
                .by_rule(),
            rule<check_state>,
            output<&Args::rows>("[tokens, d=512]", follows("kv", same, accumulator_of),
                                "to write into; new, of zeros and as kv, if None and without slots")
                .described(),
            optional_output<&Args::cache>(
                "[blocks, block_size, 1, row]", any_of(u8, f8_e4m3, bf16),
                "rows are stored in it, as by sparse_mla.store(): bfloat16 "
                "of d columns, or \"fp8_584\" where d is 512")
                .by_rule(),
            optional_output<&Args::pages>("[num_pages, 64 * (d + 4)]", any_of(u8),
                                          "rows are stored in them, as by indexer.quantize(); d is "
                                          "128 or 64")
                .by_rule(),
            optional_input<&Args::slots>("[tokens]", any_of(i64, i32),
                                         "block * block_size + offset of the row that a token "
                                         "completes; a negative one is skipped")
                .by_rule(),
            rule<check_stored>),
        finish<Args>(),
        std::tuple(value<&Args::power_of_two>("round the scales in pages up to powers of two")));
  }
};
inline constexpr contract::Contract<StepTable> kStep;

}  // namespace winnow::compressor
