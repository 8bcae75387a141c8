// The formula of paged_xl::position_term in double precision. It shares no code with any backend,
// and the oracle of attention builds on it.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "winnow/core/dtype.h"
#include "winnow/core/tensor.h"
#include "winnow/paged_xl/position_term/position_term.h"

namespace winnow::paged_xl::oracle {

// One element of a float tensor on the host.
template <class... Index>
double element(const ConstTensorView& view, Index... index) {
  switch (view.dtype()) {
    case DType::f64:
      return view.at<double>(index...);
    case DType::f16:
      return static_cast<float>(view.at<Half>(index...));
    case DType::bf16:
      return static_cast<float>(view.at<BFloat16>(index...));
    default:
      return view.at<float>(index...);
  }
}

// query[s, h] + bias[h], the bias perhaps per sequence.
inline std::vector<double> add_bias(const ConstTensorView& query, const ConstTensorView& bias,
                                    std::int64_t s, std::int64_t h) {
  std::vector<double> sum;
  for (std::int64_t d = 0; d < query.size(2); ++d) {
    const double b = bias.rank() == 3 ? element(bias, s, h, d) : element(bias, h, d);
    sum.push_back(element(query, s, h, d) + b);
  }
  return sum;
}

// dot(q_v, r[h, distance]) of the token j in a context of `context_len` tokens.
inline double position_entry(const std::vector<double>& q_v, const ConstTensorView& r,
                             std::int64_t h, std::int64_t context_len, std::int64_t j) {
  const std::int64_t distance = context_len - 1 - j;
  double sum = 0;
  for (std::int64_t d = 0; d < r.size(2); ++d) {
    sum += q_v[static_cast<std::size_t>(d)] * element(r, h, distance, d);
  }
  return sum;
}

// matrix_bd [num_seqs, num_heads, columns]; NaN where the operation writes nothing.
inline std::vector<double> position_term(const PositionTermArgs& args) {
  std::vector<double> result;
  for (std::int64_t s = 0; s < args.query.size(0); ++s) {
    const std::int64_t context_len = args.context_lens.at<std::int32_t>(s);
    for (std::int64_t h = 0; h < args.query.size(1); ++h) {
      const std::vector<double> q_v = add_bias(args.query, args.pos_bias_v, s, h);
      for (std::int64_t j = 0; j < args.matrix_bd.size(2); ++j) {
        result.push_back(j < context_len ? position_entry(q_v, args.r, h, context_len, j)
                                         : std::numeric_limits<double>::quiet_NaN());
      }
    }
  }
  return result;
}

}  // namespace winnow::paged_xl::oracle
