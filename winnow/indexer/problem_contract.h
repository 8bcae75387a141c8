// What the tables of topk(), scores() and their gradient have in common.
// In a shape, "h=64" says which size winnow.supports() assumes unless it is given one
// (core/contract_table.h). It does not restrict calls. Internal.
#pragma once

#include <tuple>

#include "winnow/core/contract.h"
#include "winnow/indexer/problem.h"

namespace winnow::indexer {

// Queries, keys, and the rows that each query sees.
template <class Args>
consteval auto problem() {
  using namespace contract;
  using enum DType;
  return std::tuple(
      ranks<&Args::q, &Args::k>, rule<check_heads, &Args::q>,
      input<&Args::q>("[s_q, h=64, d=128]",
                      any_of(f32, f16, bf16, f8_e4m3).on_gpu(f16, bf16, f8_e4m3).asked(),
                      "h 1 to 128, d 128 or 64"),
      input<&Args::k>("[s_k, d]", as("q"), "one key for all heads"), rule<check_keys, &Args::k>,
      input<&Args::weights>("[s_q, h]", any_of(f32, bf16),
                            "include d**-0.5, h**-0.5 and the scale of q"),
      rule<check_scaled, &Args::q, &Args::k_scale>,
      optional_input<&Args::k_scale>("[s_k]", any_of(f32),
                                     "required for float8_e4m3fn, else not allowed"),
      optional_input<&Args::key_start>("[s_q]", any_of(i32), kWithNext),
      optional_input<&Args::key_end>("[s_q]", any_of(i32),
                                     "the range of rows that each query sees"),
      value<&Args::q_start>("position of query 0; switches the causal limit on"),
      value<&Args::k_stride>("tokens that one row of k stands for; needs q_start if it is not 1"),
      rule<check_positions, &Args::q, &Args::q_start, &Args::k_stride>);
}

}  // namespace winnow::indexer
