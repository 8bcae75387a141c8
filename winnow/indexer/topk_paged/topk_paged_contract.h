// What topk_paged() takes. Internal.
#pragma once

#include <tuple>

#include "winnow/indexer/topk_paged/paged_problem.h"
#include "winnow/indexer/topk_paged/topk_paged.h"

namespace winnow::indexer {

struct TopkPagedTable {
  using Args = TopkPagedArgs;
  static constexpr const char* kOperation = "indexer::topk_paged";
  static consteval auto entries() {
    using namespace contract;
    using enum DType;
    return std::tuple_cat(
        paged_problem<Args>(),
        std::tuple(value<&Args::ties>(
                       "\"smaller\" or \"larger\": which position is chosen between equal scores"),
                   value<&Args::positions>("return positions in the sequence instead of slots"),
                   ranks<&Args::indices>, rule<check_topk, &Args::indices>,
                   output<&Args::indices>("[b, s_q, topk=64]", any_of(i32)),
                   output<&Args::length>("[b, s_q]", any_of(i32)),
                   optional_output<&Args::scores>("[b, s_q, topk]", any_of(f32)),
                   scratch<&Args::workspace>()));
  }
};
inline constexpr contract::Contract<TopkPagedTable> kTopkPaged;

}  // namespace winnow::indexer
