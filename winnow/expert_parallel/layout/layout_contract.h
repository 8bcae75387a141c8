// What layout() takes.
// In a shape, "topk=8" says which size winnow.supports() assumes unless it is given one
// (core/contract_table.h); a call may have any. Internal.
#pragma once

#include <tuple>

#include "winnow/core/contract.h"
#include "winnow/expert_parallel/layout/layout.h"

namespace winnow::expert_parallel {

void check_sizes(const Check& check, const LayoutArgs& args);

struct LayoutTable {
  using Args = LayoutArgs;
  static constexpr const char* kOperation = "expert_parallel::layout";
  static consteval auto entries() {
    using namespace contract;
    using enum DType;
    return std::tuple(
        input<&Args::expert_indices>("[n, K]", any_of(i32),
                                     "the experts of each token, K from 1 to 32")
            .asked("[0, topk=8]"),
        value<&Args::experts>("E, a multiple of world_size", "[E]").asked("[experts=8*world_size]"),
        value<&Args::world_size>("W, a multiple of local_world_size", "[W]").asked("[world_size]"),
        value<&Args::local_world_size>("L, ranks per node", "[L]")
            .asked("[local_world_size=world_size]"),
        rule<check_sizes>, optional_output<&Args::tokens_per_rank>("[W]", any_of(i32)),
        optional_output<&Args::tokens_per_node>("[W/L]", any_of(i32)),
        optional_output<&Args::tokens_per_expert>("[E]", any_of(i32)),
        output<&Args::is_token_in_rank>("[n, W]", any_of(u8)).described().asked("[0, world_size]"));
  }
};
inline constexpr contract::Contract<LayoutTable> kLayout;

}  // namespace winnow::expert_parallel
