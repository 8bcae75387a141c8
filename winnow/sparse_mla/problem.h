// What the three sparse MLA operations share behind the entry point: the plain description of their
// common inputs. Internal.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string_view>

#include "winnow/core/dtype.h"
#include "winnow/core/export.h"
#include "winnow/core/read_once.h"
#include "winnow/core/row_limits.h"
#include "winnow/core/rows.h"
#include "winnow/core/tensor.h"

namespace winnow {
class Check;
}

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

// That of arguments which the contract has checked. backward() has no ranges.
template <class Args>
Problem problem_of(const Args& args) {
  Problem problem;
  problem.dtype = args.q.dtype();
  problem.s_q = args.q.size(0);
  problem.h_q = args.q.size(1);
  problem.d_qk = args.q.size(2);
  problem.s_kv = args.kv.size(0);
  problem.dense = !args.indices.present();
  problem.topk = problem.dense ? problem.s_kv : args.indices.size(args.indices.rank() - 1);
  const double scale = args.scale.value_or(1.0 / std::sqrt(double(problem.d_qk)));
  problem.scale = round_to_accumulator(problem.dtype, scale);
  problem.q = rows_of<const void*>(args.q, 0, 1);
  problem.kv = rows_of<const void*>(args.kv, 0);
  problem.indices = rows_of<const std::int32_t*>(args.indices, 0);
  problem.topk_length = rows_of<const std::int32_t*>(args.topk_length, 0);
  RowLimits& limits = problem;
  limits = limits_of(args);
  return problem;
}

// Rules of the contracts.
void check_width(const Check& check, const ConstTensorView& q);
void check_rows(const Check& check, const ConstTensorView& kv);
void check_scale(const Check& check, std::optional<double> scale, const ConstTensorView& q);

// What the sm90 kernels want beyond that. Of q, kv and what is shaped like them: bf16, and rows
// that begin at multiples of 16 bytes. Of the sizes: that 32 bits count them.
void check_for_sm90(const Check& check, std::string_view argument, const ConstTensorView& view);
WINNOW_EXPORT void check_sizes_for_sm90(const Check& check, const Problem& problem);

}  // namespace winnow::sparse_mla
