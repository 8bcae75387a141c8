// What backward() takes. Internal.
#pragma once

#include <tuple>

#include "winnow/compressor/backward/backward.h"
#include "winnow/compressor/problem_contract.h"

namespace winnow::compressor {

inline void check_d_norm_weight(const Check& check, const BackwardArgs& args) {
  const bool norm = args.norm_weight.present(), given = args.d_norm_weight.present();
  check.that(norm == given, "d_norm_weight",
             norm ? "a tensor, as norm_weight is" : "none, where norm_weight is absent",
             given ? "a tensor" : "none");
}

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
        std::tuple(output<&Args::d_kv>("[tokens, columns]", follows("kv", same, accumulator_of),
                                       "to write into; new, as kv, if None"),
                   output<&Args::d_gate>("[tokens, columns]", follows("kv", same, accumulator_of),
                                         "the same"),
                   output<&Args::d_position_bias>("[ratio, columns]", sums_of("kv"),
                                                  "to write into; new if None"),
                   rule<check_d_norm_weight>,
                   optional_output<&Args::d_norm_weight>("[d]", sums_of("kv"),
                                                         "new if norm_weight is given"),
                   scratch<&Args::workspace>()));
  }
};
inline constexpr contract::Contract<BackwardTable> kBackward;

}  // namespace winnow::compressor
