// What scores() takes. Internal.
#pragma once

#include <tuple>

#include "winnow/indexer/problem_contract.h"
#include "winnow/indexer/scores/scores.h"

namespace winnow::indexer {

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
                   output<&Args::scores>("[s_q, topk or s_k]", any_of(DType::f32))));
  }
};
inline constexpr contract::Contract<ScoresTable> kScores;

}  // namespace winnow::indexer
