#include "winnow/sparse_mla/problem.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <string>

namespace winnow::sparse_mla {

Problem check_problem(const Check& check, const ConstTensorView& q, const ConstTensorView& kv,
                      const ConstTensorView& indices, const ConstTensorView& topk_length,
                      std::optional<double> scale, std::optional<std::int64_t> q_start,
                      std::int64_t k_stride) {
  check.rank("q", q, 3, "[s_q, h_q, d_qk]");
  check.rank("kv", kv, 3, "[s_kv, 1, d_qk]");
  check.rank("indices", indices, 3, "[s_q, 1, topk]");
  Problem problem;
  problem.dtype = q.dtype();
  problem.s_q = q.size(0);
  problem.h_q = q.size(1);
  problem.d_qk = q.size(2);
  problem.s_kv = kv.size(0);
  problem.topk = indices.size(2);
  const Device device = q.device();
  check.that(problem.d_qk == 576 || problem.d_qk == 512, "q", "d_qk = 576 or 512",
             "d_qk = " + std::to_string(problem.d_qk));
  check.input("q", q, {{"s_q", problem.s_q}, {"h_q", problem.h_q}, {"d_qk", problem.d_qk}},
              {DType::f32, DType::f16, DType::bf16, DType::f64}, device);
  check.input("kv", kv, {{"s_kv", problem.s_kv}, {"1", 1}, {"d_qk", problem.d_qk}}, {q.dtype()},
              device);
  check.input("indices", indices, {{"s_q", problem.s_q}, {"1", 1}, {"topk", problem.topk}},
              {DType::i32}, device);
  check.that(problem.s_kv <= std::numeric_limits<std::int32_t>::max(), "kv",
             "at most 2^31 - 1 rows, the range of the indices", std::to_string(problem.s_kv));
  if (topk_length.present()) {
    check.input("topk_length", topk_length, {{"s_q", problem.s_q}}, {DType::i32}, device);
  }
  check.that(!scale.has_value() || std::isfinite(round_to_accumulator(q.dtype(), *scale)), "scale",
             "a finite number", std::to_string(scale.value_or(0)));

  check.that(k_stride >= 1, "k_stride", "1 or more", std::to_string(k_stride));
  check.that(q_start.has_value() || k_stride == 1, "k_stride", "1 where q_start is absent",
             std::to_string(k_stride));
  constexpr std::int64_t kMaxPosition = std::int64_t{1} << 62;
  const std::int64_t first = q_start.value_or(0);
  check.that(first >= -kMaxPosition && first <= kMaxPosition - problem.s_q, "q_start",
             "positions within 2^62", std::to_string(first));

  problem.scale =
      round_to_accumulator(q.dtype(), scale.value_or(1.0 / std::sqrt(double(problem.d_qk))));
  problem.q = rows_of<const void*>(q, 0, 1);
  problem.kv = rows_of<const void*>(kv, 0);
  problem.indices = rows_of<const std::int32_t*>(indices, 0);
  problem.topk_length = rows_of<const std::int32_t*>(topk_length, 0);
  problem.causal = q_start.has_value();
  problem.q_start = first;
  problem.k_stride = k_stride;
  return problem;
}

void check_for_sm90(const Check& check, std::string_view argument, const ConstTensorView& view) {
  constexpr std::int64_t kAlignment = 16;  // of the kernels' copies
  check.that(view.dtype() != DType::f64, argument,
             "dtype bf16 on sm90 (f64 runs on the cpu backend)", "f64");
  check.dtype(argument, view, {DType::bf16});
  check.aligned(argument, view, kAlignment);
}

void check_sizes_for_sm90(const Check& check, const Problem& problem) {
  constexpr std::int64_t kLimit = std::int64_t{1} << 30;
  const std::int64_t heads = std::max<std::int64_t>(problem.h_q, 1);
  if (problem.topk <= kLimit && heads <= kLimit && problem.s_q <= kLimit / heads) return;
  check.unsupported("sm90: want topk and s_q * h_q up to 2^30, got topk " +
                    std::to_string(problem.topk) + ", s_q " + std::to_string(problem.s_q) +
                    ", h_q " + std::to_string(problem.h_q));
}

}  // namespace winnow::sparse_mla
