#include "winnow/sparse_mla/problem.h"

#include <algorithm>
#include <limits>
#include <string>

#include "winnow/core/check.h"

namespace winnow::sparse_mla {

void check_width(const Check& check, const ConstTensorView& q) {
  check.that(q.size(2) == 576 || q.size(2) == 512, "q", "d_qk = 576 or 512",
             "d_qk = " + std::to_string(q.size(2)));
}

void check_rows(const Check& check, const ConstTensorView& kv) {
  check.that(kv.size(0) <= std::numeric_limits<std::int32_t>::max(), "kv",
             "at most 2^31 - 1 rows, the range of the indices", std::to_string(kv.size(0)));
}

void check_scale(const Check& check, std::optional<double> scale, const ConstTensorView& q) {
  check.finite("scale", scale, q.dtype());
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
