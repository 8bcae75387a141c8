// What backward() takes. Internal.
#pragma once

#include <tuple>

#include "winnow/sparse_mla/backward/backward.h"
#include "winnow/sparse_mla/problem_contract.h"

namespace winnow::sparse_mla {

inline void check_sink_of(const Check& check, const BackwardArgs& args) {
  check.that(args.attn_sink.present() || !args.d_sink.present(), "d_sink",
             "attn_sink to be given as well", "no attn_sink");
}

inline void check_extra_gradient(const Check& check, const BackwardArgs& args) {
  check_beside_extra(check, "dextra_kv", args.dextra_kv, args.extra_kv);
}

struct BackwardTable {
  using Args = BackwardArgs;
  static constexpr const char* kOperation = "sparse_mla::backward";
  static consteval auto entries() {
    using namespace contract;
    return std::tuple_cat(
        queries_and_rows<Args>(), choice<Args>(), scale_and_limit<Args>(), extra_rows<Args>(),
        std::tuple(
            optional_input<&Args::delta>("[s_q, h_q]", sums_of("q"), "computed if None"),
            input<&Args::out>("[s_q, h_q, d_v:512]", as("q"),
                              "the result of forward(); may be None if delta is given")
                .unless<&Args::delta>(),
            input<&Args::lse>("[s_q, h_q]", sums_of("q"),
                              "natural logarithm, without the sink: the result of forward()"),
            input<&Args::d_out>("[s_q, h_q, d_v:512]", as("q"), "the gradient of out"),
            optional_input<&Args::attn_sink>("[h_q]", sums_of("q"),
                                             "a logit per head without a value"),
            value<&Args::deterministic>(
                "bitwise equal results run after run (on the CPU they always are)"),
            output<&Args::dq>("[s_q, h_q, d_qk]", follows("q", same, accumulator_of),
                              "to write into; new, as q, if None"),
            output<&Args::dkv>("[s_kv, 1, d_qk]", follows("q", same, accumulator_of),
                               "rounded once, at the end; new, float32, if None"),
            rule<check_extra_gradient>,
            optional_output<&Args::dextra_kv>(
                "[s_extra, 1, d_qk]", follows("q", same, accumulator_of),
                "as dkv, of extra_kv; new if None and extra_kv is given"),
            rule<check_sink_of>,
            optional_output<&Args::d_sink>("[h_q]", sums_of("q"),
                                           "new if None and attn_sink is given. dq, dkv, d_sink "
                                           "and dextra_kv must not overlap inputs or each other"),
            scratch<&Args::workspace>()));
  }
};
inline constexpr contract::Contract<BackwardTable> kBackward;

}  // namespace winnow::sparse_mla
