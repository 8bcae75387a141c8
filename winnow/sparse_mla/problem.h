// What the three sparse MLA operations share behind the entry point: the plain description of their
// common inputs. Internal.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "winnow/core/backend.h"
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

// A cache and the choice of its rows. Either `indices` name the rows of each query, or the source
// is dense: each query has all rows that it may see, entry j is row j, and topk is s_kv.
struct Source : RowLimits {
  std::int64_t s_kv = 0, topk = 0;
  bool dense = false;
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

// Queries and the rows that they attend to: the inputs of forward, distribution and backward. The
// rows and entries of `extra`, the second source, are numbered on after those of the first. `extra`
// is empty if there is no second source.
struct Problem : Source {
  DType dtype = DType::f32;
  std::int64_t s_q = 0, h_q = 0, d_qk = 0;
  double scale = 0;     // rounded to f32 unless dtype is f64
  Rows<const void*> q;  // [s_q, h_q, d_qk]
  Source extra;

  std::int64_t all_rows() const { return s_kv + extra.s_kv; }
  std::int64_t all_entries() const { return topk + extra.topk; }
};

// The arguments of one source. The last four have the names that limits_of() reads.
struct SourceArgs {
  const ConstTensorView &kv, &indices, &topk_length, &key_start, &key_end;
  std::optional<std::int64_t> q_start;
  std::int64_t k_stride;
};
template <class Args>
SourceArgs first_source(const Args& args) {
  return {args.kv,      args.indices, args.topk_length, args.key_start,
          args.key_end, args.q_start, args.k_stride};
}
template <class Args>
SourceArgs extra_source(const Args& args) {
  return {args.extra_kv,      args.extra_indices, args.extra_topk_length, args.extra_key_start,
          args.extra_key_end, args.q_start,       args.extra_k_stride};
}

// The contract must have checked the arguments.
WINNOW_EXPORT Source source_of(const SourceArgs& args);

template <class Args>
Problem problem_of(const Args& args) {
  Problem problem;
  problem.dtype = args.q.dtype();
  problem.s_q = args.q.size(0);
  problem.h_q = args.q.size(1);
  problem.d_qk = args.q.size(2);
  const double scale = args.scale.value_or(1.0 / std::sqrt(double(problem.d_qk)));
  problem.scale = round_to_accumulator(problem.dtype, scale);
  problem.q = rows_of<const void*>(args.q, 0, 1);
  static_cast<Source&>(problem) = source_of(first_source(args));
  problem.extra = source_of(extra_source(args));
  return problem;
}

// Rules of the contracts.
void check_width(const Check& check, const ConstTensorView& q);
void check_rows(const Check& check, const ConstTensorView& kv);
void check_scale(const Check& check, std::optional<double> scale, const ConstTensorView& q);
// Each query has either a list of rows (indices) or a range (key_start and key_end).
void check_choice(const Check& check, const SourceArgs& args);
// The same of a second source, if there is one.
void check_extra(const Check& check, const SourceArgs& args);
// The output must be given if extra_kv is given, and only then.
void check_beside_extra(const Check& check, std::string_view name, const ConstTensorView& output,
                        const ConstTensorView& extra_kv);

// What the kernels of GPUs require beyond the contract: the rows of q, kv and what is shaped like
// them begin at multiples of 16 bytes. The sizes are left to check_sizes_for_gpu().
void check_for_gpu(const Check& check, std::string_view argument, const ConstTensorView& view);
// Refuses a second source, for a backend whose kernels read only one.
WINNOW_EXPORT void check_one_source(const Check& check, Backend backend, const Problem& problem);
WINNOW_EXPORT void check_sizes_for_gpu(const Check& check, Backend backend, const Problem& problem);

}  // namespace winnow::sparse_mla
