// What scores_paged() takes. Internal.
#pragma once

#include <tuple>

#include "winnow/indexer/scores_paged/scores_paged.h"
#include "winnow/indexer/topk_paged/paged_problem.h"

namespace winnow::indexer {

void check_columns(const Check& check, const TensorView& scores);

struct ScoresPagedTable {
  using Args = ScoresPagedArgs;
  static constexpr const char* kOperation = "indexer::scores_paged";
  static consteval auto entries() {
    using namespace contract;
    return std::tuple_cat(
        paged_problem<Args>(),
        std::tuple(value<&Args::clean>("write -inf behind the rows that a query sees"),
                   ranks<&Args::scores>, rule<check_columns, &Args::scores>,
                   output<&Args::scores>("[b, s_q, max_context=64]", any_of(DType::f32))));
  }
};
inline constexpr contract::Contract<ScoresPagedTable> kScoresPaged;

}  // namespace winnow::indexer
