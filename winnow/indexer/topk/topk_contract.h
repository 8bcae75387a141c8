// What topk() takes. Internal.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <tuple>

#include "winnow/indexer/problem_contract.h"
#include "winnow/indexer/topk/topk.h"

namespace winnow::indexer {

// The last dimension of `indices`, which topk_paged() has, too.
template <class Args>
void check_topk(const Check& check, const Args& args) {
  const std::int64_t topk = args.indices.size(args.indices.rank() - 1);
  check.that(topk >= 1 && topk <= std::numeric_limits<std::int32_t>::max(), "indices",
             "topk from 1 to 2^31 - 1", std::to_string(topk));
}

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
                   ranks<&Args::indices>, rule<check_topk<Args>>,
                   output<&Args::indices>("[s_q, topk=64]", any_of(i32)),
                   output<&Args::length>("[s_q]", any_of(i32)),
                   optional_output<&Args::scores>("[s_q, topk]", any_of(f32)),
                   scratch<&Args::workspace>()));
  }
};
inline constexpr contract::Contract<TopkTable> kTopk;

}  // namespace winnow::indexer
