// What the three sparse MLA operations share below the door: the plain description of their common
// inputs, and the checks that make one. Internal.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string_view>

#include "winnow/core/check.h"
#include "winnow/core/dtype.h"
#include "winnow/core/export.h"
#include "winnow/core/read_once.h"
#include "winnow/core/row_limits.h"
#include "winnow/core/rows.h"
#include "winnow/core/tensor.h"

namespace winnow::sparse_mla {

// Queries, cache and the choice of rows: the inputs of forward, distribution and backward. Either
// `indices` name the rows of each query, or, in a dense problem, these are all that it sees, and
// entry j of a query is row j: topk is s_kv.
struct Problem : RowLimits {
  DType dtype = DType::f32;
  std::int64_t s_q = 0, h_q = 0, s_kv = 0, d_qk = 0, topk = 0;
  double scale = 0;  // rounded to f32 unless dtype is f64
  bool dense = false;
  Rows<const void*> q;                    // [s_q, h_q, d_qk]
  Rows<const void*> kv;                   // [s_kv, d_qk]
  Rows<const std::int32_t*> indices;      // [s_q, topk]
  Rows<const std::int32_t*> topk_length;  // [s_q]; null: every entry counts

  // Entries of query i that count.
  std::int64_t entries(std::int64_t i) const {
    if (!topk_length.present()) return topk;
    return std::clamp<std::int64_t>(read_once(topk_length.data + topk_length.offset(i)), 0, topk);
  }

  // The rows that query i may see.
  RowRange visible_rows(std::int64_t i) const { return range_of(i, s_kv); }
};

// The tensors and numbers that the argument structs have in common. backward() has no ranges.
struct Inputs {
  ConstTensorView q, kv, indices, topk_length, key_start, key_end;
  std::optional<double> scale;
  std::optional<std::int64_t> q_start;
  std::int64_t k_stride = 1;
};

// Checks them; throws Error naming the one at fault.
Problem check_problem(const Check& check, const Inputs& inputs);

// What the sm90 kernels want beyond that. Of q, kv and what is shaped like them: bf16, and rows
// that begin at multiples of 16 bytes. Of the sizes: that 32 bits count them.
void check_for_sm90(const Check& check, std::string_view argument, const ConstTensorView& view);
WINNOW_EXPORT void check_sizes_for_sm90(const Check& check, const Problem& problem);

// check_problem() from the argument struct of any of the three.
template <class Args>
Problem check_problem(const Check& check, const Args& args) {
  Inputs inputs{.q = args.q,
                .kv = args.kv,
                .indices = args.indices,
                .topk_length = args.topk_length,
                .key_start = {},
                .key_end = {},
                .scale = args.scale,
                .q_start = args.q_start,
                .k_stride = args.k_stride};
  if constexpr (requires { args.key_start; }) {
    inputs.key_start = args.key_start;
    inputs.key_end = args.key_end;
  }
  return check_problem(check, inputs);
}

}  // namespace winnow::sparse_mla
