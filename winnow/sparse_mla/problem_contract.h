// What the tables of forward(), distribution() and backward() have in common.
// In a shape, "h_q=64" says which size winnow.supports() assumes unless it is given one
// (core/contract_table.h). It does not restrict calls. Internal.
#pragma once

#include <tuple>

#include "winnow/core/contract.h"
#include "winnow/core/row_limits.h"
#include "winnow/sparse_mla/problem.h"

namespace winnow::sparse_mla {

template <class Args>
void check_first_choice(const Check& check, const Args& args) {
  check_choice(check, first_source(args));
}
template <class Args>
void check_extra_source(const Check& check, const Args& args) {
  check_extra(check, extra_source(args));
}

template <class Args>
consteval auto queries_and_rows() {
  using namespace contract;
  using enum DType;
  return std::tuple(ranks<&Args::q, &Args::kv>, rule<check_width, &Args::q>,
                    input<&Args::q>("[s_q, h_q=64, d_qk=576]",
                                    any_of(f32, f16, bf16, f64).on_gpu(bf16, f16).asked(),
                                    "d_qk is 576 or 512. With float64 every float32 tensor here "
                                    "is float64"),
                    input<&Args::kv>("[s_kv, 1, d_qk]", as("q"),
                                     "the key is the row, the value its first 512 columns"),
                    rule<check_rows, &Args::kv>);
}

// The rows that each query sees.
template <class Args>
consteval auto choice() {
  using namespace contract;
  return std::tuple(
      rule<check_first_choice<Args>>,
      input<&Args::indices>("[s_q, 1, topk=64]", any_of(DType::i32),
                            "the rows of each query; outside [0, s_kv) means absent. None with "
                            "key_start and key_end for dense attention")
          .or_as("[s_q, topk]")
          .described(),
      optional_input<&Args::topk_length>("[s_q]", any_of(DType::i32),
                                         "entries of each row that count; clamped to [0, topk]"),
      optional_input<&Args::key_start>("[s_q]", any_of(DType::i32), kWithNext),
      optional_input<&Args::key_end>("[s_q]", any_of(DType::i32),
                                     "in the place of indices: query i attends to all rows from "
                                     "key_start[i] to key_end[i] - 1 that exist and that the "
                                     "causal limit allows"));
}

// Scale and causal limit.
template <class Args>
consteval auto scale_and_limit() {
  using namespace contract;
  return std::tuple(
      value<&Args::scale>("of the logits; 1 / sqrt(d_qk) if None"),
      value<&Args::q_start>("position of query 0; switches the causal limit on"),
      value<&Args::k_stride>("tokens that one row of kv stands for; needs q_start if it is not 1"),
      rule<check_positions, &Args::q, &Args::q_start, &Args::k_stride>,
      rule<check_scale, &Args::scale, &Args::q>);
}

// A second source of rows.
template <class Args>
consteval auto extra_rows() {
  using namespace contract;
  return std::tuple(
      optional_input<&Args::extra_kv>("[s_extra, 1, d_qk]", as("q"),
                                      "a second source of rows, attended in the same softmax"),
      rule<check_extra_source<Args>>,
      optional_input<&Args::extra_indices>("[s_q, 1, extra_topk]", any_of(DType::i32),
                                           "its rows of each query; outside [0, s_extra) means "
                                           "absent. None with extra_key_start and extra_key_end")
          .or_as("[s_q, extra_topk]"),
      optional_input<&Args::extra_topk_length>("[s_q]", any_of(DType::i32), "its lengths"),
      optional_input<&Args::extra_key_start>("[s_q]", any_of(DType::i32), kWithNext),
      optional_input<&Args::extra_key_end>("[s_q]", any_of(DType::i32),
                                           "in the place of extra_indices: its range of each "
                                           "query"),
      value<&Args::extra_k_stride>(
          "tokens that one row of extra_kv stands for; needs q_start if it is not 1"));
}

}  // namespace winnow::sparse_mla
