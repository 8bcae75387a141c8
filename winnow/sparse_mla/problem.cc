#include "winnow/sparse_mla/problem.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <string>

namespace winnow::sparse_mla {

namespace {

// The choice of rows: a list for each query, or without one a range.
void check_choice(const Check& check, const Inputs& inputs, Problem& problem, Device device) {
  const auto& [q, kv, indices, topk_length, key_start, key_end, scale, q_start, k_stride] = inputs;
  const Dim s_q{"s_q", problem.s_q};
  const bool ranges = key_start.present() || key_end.present();
  if (!indices.present() && ranges) {
    check.rank("key_start", key_start, 1, "[s_q], beside key_end");
    check.rank("key_end", key_end, 1, "[s_q], beside key_start");
    check.that(!topk_length.present(), "topk_length", "none, without indices", "a tensor");
    problem.dense = true;
    problem.topk = problem.s_kv;
  } else {
    check.that(!ranges, key_start.present() ? "key_start" : "key_end", "none, beside indices",
               "a tensor");
    const bool flat = indices.present() && indices.rank() == 2;
    if (!flat) check.rank("indices", indices, 3, "[s_q, 1, topk]");
    problem.topk = indices.size(flat ? 1 : 2);
    const Dim topk{"topk", problem.topk};
    if (flat) {
      check.input("indices", indices, {s_q, topk}, {DType::i32}, device);
    } else {
      check.input("indices", indices, {s_q, {"1", 1}, topk}, {DType::i32}, device);
    }
  }
  if (topk_length.present()) {
    check.input("topk_length", topk_length, {s_q}, {DType::i32}, device);
  }
  problem.indices = rows_of<const std::int32_t*>(indices, 0);
  problem.topk_length = rows_of<const std::int32_t*>(topk_length, 0);
  static_cast<RowLimits&>(problem) =
      check_row_limits(check, key_start, key_end, q_start, k_stride, problem.s_q, device);
}

}  // namespace

Problem check_problem(const Check& check, const Inputs& inputs) {
  const auto& [q, kv, indices, topk_length, key_start, key_end, scale, q_start, k_stride] = inputs;
  check.rank("q", q, 3, "[s_q, h_q, d_qk]");
  check.rank("kv", kv, 3, "[s_kv, 1, d_qk]");
  Problem problem;
  problem.dtype = q.dtype();
  problem.s_q = q.size(0);
  problem.h_q = q.size(1);
  problem.d_qk = q.size(2);
  problem.s_kv = kv.size(0);
  const Device device = q.device();
  check.that(problem.d_qk == 576 || problem.d_qk == 512, "q", "d_qk = 576 or 512",
             "d_qk = " + std::to_string(problem.d_qk));
  check.input("q", q, {{"s_q", problem.s_q}, {"h_q", problem.h_q}, {"d_qk", problem.d_qk}},
              {DType::f32, DType::f16, DType::bf16, DType::f64}, device, {DType::bf16});
  check.input("kv", kv, {{"s_kv", problem.s_kv}, {"1", 1}, {"d_qk", problem.d_qk}}, {q.dtype()},
              device);
  check.that(problem.s_kv <= std::numeric_limits<std::int32_t>::max(), "kv",
             "at most 2^31 - 1 rows, the range of the indices", std::to_string(problem.s_kv));
  check_choice(check, inputs, problem, device);
  check.that(!scale.has_value() || std::isfinite(round_to_accumulator(q.dtype(), *scale)), "scale",
             "a finite number", std::to_string(scale.value_or(0)));

  problem.scale =
      round_to_accumulator(q.dtype(), scale.value_or(1.0 / std::sqrt(double(problem.d_qk))));
  problem.q = rows_of<const void*>(q, 0, 1);
  problem.kv = rows_of<const void*>(kv, 0);
  return problem;
}

void check_for_sm90(const Check& check, std::string_view argument, const ConstTensorView& view) {
  constexpr std::int64_t kAlignment = 16;  // of the kernels' copies
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
