#include "winnow/sparse_mla/problem.h"

#include <algorithm>
#include <string>

#include "winnow/core/check.h"

namespace winnow::sparse_mla {

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
