// What forward() takes. Internal.
#pragma once

#include <tuple>

#include "winnow/compressor/forward/forward.h"
#include "winnow/compressor/problem_contract.h"

namespace winnow::compressor {

inline void check_rows_of(const Check& check, const ForwardArgs& args) {
  check_row_columns(check, "rows", args.rows, args.kv, args.overlap);
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
                   rule<check_rows_of>),
        finish<Args>());
  }
};
inline constexpr contract::Contract<ForwardTable> kForward;

}  // namespace winnow::compressor
