#include "winnow/indexer/problem.h"

#include <limits>
#include <string>

namespace winnow::indexer {

Problem check_problem(const Check& check, const Inputs& inputs) {
  const auto& [q, k, weights, k_scale, key_start, key_end, q_start, k_stride] = inputs;
  check.rank("q", q, 3, "[s_q, h, d]");
  check.rank("k", k, 2, "[s_k, d]");
  Problem problem;
  problem.dtype = q.dtype();
  problem.s_q = q.size(0);
  problem.h = q.size(1);
  problem.d = q.size(2);
  problem.s_k = k.size(0);
  const Device device = q.device();
  check.that(problem.d == 128 || problem.d == 64, "q", "d = 128 or 64",
             "d = " + std::to_string(problem.d));
  check.that(problem.h >= 1 && problem.h <= 128, "q", "1 to 128 heads", std::to_string(problem.h));
  const Dim s_q{"s_q", problem.s_q}, h{"h", problem.h}, d{"d", problem.d}, s_k{"s_k", problem.s_k};
  check.input("q", q, {s_q, h, d}, {DType::f32, DType::f16, DType::bf16, DType::f8_e4m3}, device,
              {DType::bf16, DType::f8_e4m3});
  check.input("k", k, {s_k, d}, {q.dtype()}, device);
  check.that(problem.s_k <= std::numeric_limits<std::int32_t>::max(), "k",
             "at most 2^31 - 1 rows, the range of the indices", std::to_string(problem.s_k));
  check.input("weights", weights, {s_q, h}, {DType::f32, DType::bf16}, device);
  const bool scaled = q.dtype() == DType::f8_e4m3;
  check.that(
      k_scale.present() == scaled, "k_scale",
      scaled ? "a tensor [s_k], which f8_e4m3 keys need" : "none, for keys that are not f8_e4m3",
      k_scale.present() ? "a tensor" : "none");
  if (scaled) check.input("k_scale", k_scale, {s_k}, {DType::f32}, device);
  static_cast<RowLimits&>(problem) =
      check_row_limits(check, key_start, key_end, q_start, k_stride, problem.s_q, device);

  problem.q = rows_of<const void*>(q, 0, 1);
  problem.k = rows_of<const void*>(k, 0);
  problem.k_scale = rows_of<const float*>(k_scale, 0);
  problem.weights_dtype = weights.dtype();
  problem.weights = rows_of<const void*>(weights, 0);
  return problem;
}

void check_for_sm90(const Check& check, const Inputs& inputs, const Problem& problem) {
  constexpr std::int64_t kAlignment = 16;  // of copies by the tensor memory accelerator
  for (const auto& [name, view] : {std::pair{"q", inputs.q}, std::pair{"k", inputs.k}}) {
    check.aligned(name, view, kAlignment);
    for (int dim = 0; dim + 1 < view.rank(); ++dim) {
      if (view.size(dim) > 1 && view.stride(dim) < 1) {
        check.unsupported(std::string("sm90: ") + name + ": want strides above 0, got " +
                          std::to_string(view.stride(dim)));
      }
    }
  }
  constexpr std::int64_t kLimit = std::int64_t{1} << 30;
  if (problem.s_q > kLimit || problem.s_k > kLimit) {
    check.unsupported("sm90: want s_q and s_k up to 2^30, got s_q " + std::to_string(problem.s_q) +
                      ", s_k " + std::to_string(problem.s_k));
  }
}

}  // namespace winnow::indexer
