// What position_term() takes. Internal.
#pragma once

#include <tuple>

#include "winnow/paged_xl/position_term/position_term.h"
#include "winnow/paged_xl/problem_contract.h"

namespace winnow::paged_xl {

struct PositionTermTable {
  using Args = PositionTermArgs;
  static constexpr const char* kOperation = "paged_xl::position_term";
  static consteval auto entries() {
    using namespace contract;
    return std::tuple_cat(
        query<Args>(),
        std::tuple(pos_bias<&Args::pos_bias_v>("position bias"), relative<&Args::r>(),
                   context_lens<&Args::context_lens>(),
                   rule<check_matrix_bd, &Args::matrix_bd, &Args::query>,
                   output<&Args::matrix_bd>("[num_seqs, num_heads, columns]",
                                            follows("query", same, accumulator_of))));
  }
};
inline constexpr contract::Contract<PositionTermTable> kPositionTerm;

}  // namespace winnow::paged_xl
