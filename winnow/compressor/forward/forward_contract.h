// What forward() takes. Internal.
#pragma once

#include <tuple>

#include "winnow/compressor/forward/forward.h"
#include "winnow/compressor/problem_contract.h"

namespace winnow::compressor {

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
        finish<Args>());
  }
};
inline constexpr contract::Contract<ForwardTable> kForward;

}  // namespace winnow::compressor
