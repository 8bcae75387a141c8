// What forward() takes. Internal.
#pragma once

#include <tuple>

#include "winnow/sparse_mla/forward/forward.h"
#include "winnow/sparse_mla/lse_contract.h"
#include "winnow/sparse_mla/problem_contract.h"

namespace winnow::sparse_mla {

struct ForwardTable {
  using Args = ForwardArgs;
  static constexpr const char* kOperation = "sparse_mla::forward";
  static consteval auto entries() {
    using namespace contract;
    return std::tuple_cat(
        queries_and_rows<Args>(), choice<Args>(), scale_and_limit<Args>(), extra_rows<Args>(),
        std::tuple(
            value<&Args::in_list_order>("every sum is formed in the order of the list, the second "
                                        "source's behind the first's, as in decode() with the same "
                                        "argument, which gives the same bits of the same rows in "
                                        "bf16. Without it a GPU may be faster"),
            flash_mla_lse<Args>(),
            optional_input<&Args::attn_sink>("[h_q]", sums_of("q"),
                                             "a logit per head without a value"),
            output<&Args::out>("[s_q, h_q, d_v:512]", as("q")),
            optional_output<&Args::max_logits>("[s_q, h_q]", sums_of("q")),
            optional_output<&Args::lse>("[s_q, h_q]", sums_of("q")), scratch<&Args::workspace>()));
  }
};
inline constexpr contract::Contract<ForwardTable> kForward;

}  // namespace winnow::sparse_mla
