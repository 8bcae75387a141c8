// What step() takes. In a shape, "ring=8" says which size winnow.supports() assumes unless it is
// given one (core/contract_table.h). Internal.
#pragma once

#include <tuple>

#include "winnow/compressor/problem_contract.h"
#include "winnow/compressor/step/step.h"

namespace winnow::compressor {

void check_state(const Check& check, const StepArgs& args);

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
                                "to write into; new, of zeros and as kv, if None"),
            rule<check_row_columns<Args, &Args::rows>>),
        finish<Args>());
  }
};
inline constexpr contract::Contract<StepTable> kStep;

}  // namespace winnow::compressor
