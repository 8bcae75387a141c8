// What forward() takes. Internal.
#pragma once

#include <tuple>

#include "winnow/compressor/forward/forward.h"
#include "winnow/compressor/problem_contract.h"

namespace winnow::compressor {

inline void check_rstd(const Check& check, const ForwardArgs& args) {
  check.that(args.norm_weight.present() || !args.rstd.present(), "rstd",
             "none, where norm_weight is absent", "a tensor");
}

struct ForwardTable {
  using Args = ForwardArgs;
  static constexpr const char* kOperation = "compressor::forward";
  static consteval auto entries() {
    using namespace contract;
    return std::tuple_cat(
        tokens<Args>(), places<Args>(),
        std::tuple(output<&Args::rows>("[rows, d=512]", follows("kv", same, accumulator_of),
                                       "to write into; new, as kv, if None"),
                   rule<check_row_columns<Args, &Args::rows>>),
        finish<Args>(),
        std::tuple(rule<check_rstd>, optional_output<&Args::rstd>("[rows]", sums_of("kv"))));
  }
};
inline constexpr contract::Contract<ForwardTable> kForward;

}  // namespace winnow::compressor
