// What the tables of attention() and position_term() have in common.
// In a shape, "num_heads=16" says which size winnow.supports() assumes unless it is given one
// (core/contract_table.h); a call may have any. Internal.
#pragma once

#include <tuple>

#include "winnow/core/contract.h"
#include "winnow/paged_xl/problem.h"

namespace winnow::paged_xl {

// A step's query.
template <class Args>
consteval auto query() {
  using namespace contract;
  using enum DType;
  return std::tuple(ranks<&Args::query>, rule<check_head_size, &Args::query>,
                    input<&Args::query>("[num_seqs, num_heads=16, head_size=128]",
                                        any_of(f32, f16, bf16, f64).on_gpu(f32, f16, bf16).asked(),
                                        "with float64 all that is float32 here is float64"));
}

// A bias per head, or per sequence and head.
template <auto kMember>
consteval auto pos_bias(std::string_view note) {
  return contract::input<kMember>("[num_heads, head_size]", contract::as("query"), note)
      .or_as("[num_seqs, num_heads, head_size]",
             "[num_heads, head_size] or 3 [num_seqs, num_heads, head_size]");
}

template <auto kMember>
consteval auto relative() {
  return contract::input<kMember>("[num_heads, max_distance, head_size]", contract::as("query"),
                                  "projected embedding of each distance");
}

template <auto kMember>
consteval auto context_lens() {
  return contract::input<kMember>("[num_seqs]", contract::any_of(DType::i32),
                                  "cached tokens, the step's own included");
}

}  // namespace winnow::paged_xl
