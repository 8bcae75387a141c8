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
#include "winnow/core/rows.h"
#include "winnow/core/tensor.h"

namespace winnow::sparse_mla {

// Queries, cache and the choice of rows: the inputs of forward, distribution and backward.
struct Problem {
  DType dtype = DType::f32;
  std::int64_t s_q = 0, h_q = 0, s_kv = 0, d_qk = 0, topk = 0;
  double scale = 0;                       // rounded to f32 unless dtype is f64
  Rows<const void*> q;                    // [s_q, h_q, d_qk]
  Rows<const void*> kv;                   // [s_kv, d_qk]
  Rows<const std::int32_t*> indices;      // [s_q, topk]
  Rows<const std::int32_t*> topk_length;  // [s_q]; null: every entry counts
  bool causal = false;                    // q_start and k_stride are in force
  std::int64_t q_start = 0;
  std::int64_t k_stride = 1;

  // Entries of query i that count.
  std::int64_t entries(std::int64_t i) const {
    if (topk_length.data == nullptr) return topk;
    return std::clamp<std::int64_t>(read_once(topk_length.data + topk_length.offset(i)), 0, topk);
  }

  // Rows t < visible_rows(i) of the cache may be seen by query i.
  std::int64_t visible_rows(std::int64_t i) const {
    if (!causal) return s_kv;
    const std::int64_t tokens = q_start + i + 1;  // at or before the query
    // Row t is visible if (t + 1) * k_stride <= tokens; division truncates, so no negative numbers.
    return tokens < k_stride ? 0 : std::min(s_kv, tokens / k_stride);
  }
};

// Checks the arguments that the three operations have in common; throws Error naming the one at
// fault.
Problem check_problem(const Check& check, const ConstTensorView& q, const ConstTensorView& kv,
                      const ConstTensorView& indices, const ConstTensorView& topk_length,
                      std::optional<double> scale, std::optional<std::int64_t> q_start,
                      std::int64_t k_stride);

// What the sm90 kernels want beyond that. Of q, kv and what is shaped like them: bf16, and rows
// that begin at multiples of 16 bytes. Of the sizes: that 32 bits count them.
void check_for_sm90(const Check& check, std::string_view argument, const ConstTensorView& view);
WINNOW_EXPORT void check_sizes_for_sm90(const Check& check, const Problem& problem);

// check_problem() from the argument struct of any of the three.
template <class Args>
Problem check_problem(const Check& check, const Args& args) {
  return check_problem(check, args.q, args.kv, args.indices, args.topk_length, args.scale,
                       args.q_start, args.k_stride);
}

}  // namespace winnow::sparse_mla
