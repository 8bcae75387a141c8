// What topk() takes. Internal.
#pragma once

#include <tuple>

#include "winnow/indexer/problem_contract.h"
#include "winnow/indexer/topk/topk.h"

namespace winnow::indexer {

struct TopkTable {
  using Args = TopkArgs;
  static constexpr const char* kOperation = "indexer::topk";
  static consteval auto entries() {
    using namespace contract;
    using enum DType;
    return std::tuple_cat(
        problem<Args>(),
        std::tuple(value<&Args::ties>(
                       "\"smaller\" or \"larger\": which row is chosen between equal scores"),
                   ranks<&Args::indices>, rule<check_topk, &Args::indices>,
                   output<&Args::indices>("[s_q, topk=64]", any_of(i32)),
                   output<&Args::length>("[s_q]", any_of(i32)),
                   optional_output<&Args::scores>("[s_q, topk]", any_of(f32)),
                   scratch<&Args::workspace>()));
  }
};
inline constexpr contract::Contract<TopkTable> kTopk;

}  // namespace winnow::indexer
