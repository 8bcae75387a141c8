// What backward() takes. Internal.
#pragma once

#include <tuple>

#include "winnow/compressor/backward/backward.h"
#include "winnow/compressor/problem_contract.h"

namespace winnow::compressor {

struct BackwardTable {
  using Args = BackwardArgs;
  static constexpr const char* kOperation = "compressor::backward";
  static consteval auto entries() {
    using namespace contract;
    return std::tuple_cat(
        tokens<Args>(), places<Args>(),
        std::tuple(input<&Args::d_rows>("[rows, d=512]", follows("kv", same, accumulator_of),
                                        "the gradient of rows"),
                   rule<check_row_columns<Args, &Args::d_rows>>),
        finish<Args>(),
        std::tuple(rule<check_of_norm<Args, &Args::rows>>,
                   optional_input<&Args::rows>("[rows, d]", follows("kv", same, accumulator_of),
                                               "what forward() returned, with norm_weight"),
                   rule<check_of_norm<Args, &Args::rstd>>,
                   optional_input<&Args::rstd>("[rows]", sums_of("kv"), "the same")),
        std::tuple(output<&Args::d_kv>("[tokens, columns]", follows("kv", same, accumulator_of),
                                       "to write into; new, as kv, if None"),
                   output<&Args::d_gate>("[tokens, columns]", follows("kv", same, accumulator_of),
                                         "the same"),
                   output<&Args::d_position_bias>("[ratio, columns]", sums_of("kv"),
                                                  "to write into; new if None"),
                   rule<check_of_norm<Args, &Args::d_norm_weight>>,
                   optional_output<&Args::d_norm_weight>("[d]", sums_of("kv"),
                                                         "new if norm_weight is given"),
                   scratch<&Args::workspace>()));
  }
};
inline constexpr contract::Contract<BackwardTable> kBackward;

}  // namespace winnow::compressor
