// What topk_paged() takes. Internal.
#pragma once

#include <tuple>

#include "winnow/core/contract.h"
#include "winnow/indexer/problem.h"
#include "winnow/indexer/topk_paged/topk_paged.h"

namespace winnow::indexer {

void check_pages(const Check& check, const TopkPagedArgs& args);
void check_context_lens(const Check& check, const TopkPagedArgs& args);

struct TopkPagedTable {
  using Args = TopkPagedArgs;
  static constexpr const char* kOperation = "indexer::topk_paged";
  static consteval auto entries() {
    using namespace contract;
    using enum DType;
    return std::tuple(
        ranks<&Args::q, &Args::pages, &Args::block_tables>, rule<check_heads, &Args::q>,
        input<&Args::q>("[b, s_q, h=64, d=128]", any_of(f8_e4m3), "h 1 to 128, d 128 or 64"),
        input<&Args::pages>("[num_pages, 64 * (d + 4)]", any_of(u8),
                            "64 rows of d bytes, then their 64 scales as float32")
            .asked("[num_pages, d]")
            .by_rule(),
        rule<check_pages>,
        input<&Args::weights>("[b, s_q, h]", any_of(f32, bf16),
                              "include d**-0.5, h**-0.5 and the scale of q"),
        input<&Args::block_tables>("[b, n]", any_of(i32), "the pages of each sequence"),
        input<&Args::context_lens>("[b]", any_of(i32),
                                   "cached rows, including those of the step's own queries; or, "
                                   "[b, s_q], the rows that each query sees")
            .or_as("[b, s_q]")
            .by_rule(),
        rule<check_context_lens>,
        value<&Args::ties>(
            "\"smaller\" or \"larger\": which position is chosen between equal scores"),
        value<&Args::positions>("return positions in the sequence instead of slots"),
        ranks<&Args::indices>, rule<check_topk, &Args::indices>,
        output<&Args::indices>("[b, s_q, topk=64]", any_of(i32)),
        output<&Args::length>("[b, s_q]", any_of(i32)),
        optional_output<&Args::scores>("[b, s_q, topk]", any_of(f32)), scratch<&Args::workspace>());
  }
};
inline constexpr contract::Contract<TopkPagedTable> kTopkPaged;

}  // namespace winnow::indexer
