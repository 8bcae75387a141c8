// What distribution() takes. Internal.
#pragma once

#include <tuple>

#include "winnow/sparse_mla/distribution/distribution.h"
#include "winnow/sparse_mla/problem_contract.h"

namespace winnow::sparse_mla {

inline void check_extra_sum(const Check& check, const DistributionArgs& args) {
  check_beside_extra(check, "extra_attn_sum", args.extra_attn_sum, args.extra_kv);
}

struct DistributionTable {
  using Args = DistributionArgs;
  static constexpr const char* kOperation = "sparse_mla::distribution";
  static consteval auto entries() {
    using namespace contract;
    return std::tuple_cat(
        queries_and_rows<Args>(), choice<Args>(), scale_and_limit<Args>(), extra_rows<Args>(),
        std::tuple(
            input<&Args::lse>("[s_q, h_q]", sums_of("q"),
                              "natural logarithm, as forward() returns it; one in base 2 "
                              "must be multiplied by ln 2 first"),
            output<&Args::attn_sum>("[s_q, topk or s_kv]", sums_of("q")), rule<check_extra_sum>,
            optional_output<&Args::extra_attn_sum>("[s_q, extra_topk or s_extra]", sums_of("q"))));
  }
};
inline constexpr contract::Contract<DistributionTable> kDistribution;

}  // namespace winnow::sparse_mla
