// What scores() takes. Internal.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <tuple>

#include "winnow/indexer/problem_contract.h"
#include "winnow/indexer/scores/scores.h"

namespace winnow::indexer {

void check_width(const Check& check, const ScoresArgs& args);
// The part of it that a binding asks before it makes a result of that width.
inline void check_range_of_width(const Check& check, const std::optional<std::int64_t>& width) {
  const std::int64_t columns = width.value_or(0);
  check.that(columns >= 0 && columns <= std::numeric_limits<std::int32_t>::max(), "width",
             "0 to 2^31 - 1", std::to_string(columns));
}

struct ScoresTable {
  using Args = ScoresArgs;
  static constexpr const char* kOperation = "indexer::scores";
  static consteval auto entries() {
    using namespace contract;
    return std::tuple_cat(
        problem<Args>(),
        std::tuple(optional_input<&Args::indices>("[s_q, topk]", any_of(DType::i32),
                                                  "the rows to score; None for all"),
                   value<&Args::clean>("dense scores of rows that a query does not see are -inf; "
                                       "otherwise that, or left as they are"),
                   rule<check_width>,
                   value<&Args::width>("columns of dense scores of which row i begins with row "
                                       "key_start[i] of k, whatever that is; None for all rows",
                                       "[width]"),
                   output<&Args::scores>("[s_q, topk or width or s_k]", any_of(DType::f32))));
  }
};
inline constexpr contract::Contract<ScoresTable> kScores;

}  // namespace winnow::indexer
