// The formulas of indexer::backward in double precision.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "winnow/indexer/indexer_oracle.h"

namespace winnow::indexer::oracle {

// A gradient, and how far each element may be off (`slack`): by the terms whose dot product is so
// near to 0 that rounding decides whether it counts.
struct Gradient {
  std::vector<double> value, slack;
  explicit Gradient(std::int64_t elements)
      : value(static_cast<std::size_t>(elements)), slack(static_cast<std::size_t>(elements)) {}
  void add(std::int64_t at, double addend, bool certain, bool counts) {
    if (counts) value[at] += addend;
    if (!certain) slack[at] += std::abs(addend);
  }
};

struct Backward {
  Gradient dq;         // [s_q, h, d]
  Gradient dk;         // [s_k, d]
  Gradient d_weights;  // [s_q, h]
};

// `indices` may be absent. Where |dot| is at most `tolerance` times the sum of the magnitudes that
// go into it, it may count or not.
inline Backward backward(const Inputs& in, const ConstTensorView& indices,
                         const ConstTensorView& d_scores, double tolerance) {
  const std::int64_t s_q = in.q.size(0), heads = in.q.size(1), d = in.q.size(2);
  Backward result{Gradient(s_q * heads * d), Gradient(in.k.size(0) * d), Gradient(s_q * heads)};
  for (std::int64_t i = 0; i < s_q; ++i) {
    const std::vector<double> q = winnow::testing::read(in.q.slice(0, i, i + 1));
    const std::vector<double> weights = winnow::testing::read(in.weights.slice(0, i, i + 1));
    for (std::int64_t j = 0; j < d_scores.size(1); ++j) {
      const std::int64_t t = indices.present() ? indices.at<std::int32_t>(i, j) : j;
      if (!visible(in, i, t)) continue;
      const std::vector<double> k = winnow::testing::read(in.k.slice(0, t, t + 1));
      double d_score = d_scores.at<float>(i, j);
      if (in.k_scale.present()) d_score *= in.k_scale.at<float>(t);
      for (std::int64_t h = 0; h < heads; ++h) {
        double dot = 0, magnitude = 0;
        for (std::int64_t c = 0; c < d; ++c) {
          dot += q[h * d + c] * k[c];
          magnitude += std::abs(q[h * d + c] * k[c]);
        }
        const bool counts = dot > 0, certain = !(std::abs(dot) <= tolerance * magnitude);
        result.d_weights.add(i * heads + h, d_score * (counts || certain ? dot : -dot), certain,
                             !(dot <= 0));
        const double d_dot = d_score * weights[h];
        for (std::int64_t c = 0; c < d; ++c) {
          // A dot product that does not count still adds 0 * k and 0 * q, which may be NaN.
          const std::int64_t at_q = (i * heads + h) * d + c, at_k = t * d + c;
          result.dq.add(at_q, d_dot * k[c], certain, counts);
          result.dk.add(at_k, d_dot * q[h * d + c], certain, counts);
          if (counts) continue;
          result.dq.value[at_q] += 0 * k[c];
          result.dk.value[at_k] += 0 * q[h * d + c];
        }
      }
    }
  }
  return result;
}

// The actual numbers, each moved towards the expected one by at most its slack; all the way where
// the slack is not finite.
inline std::vector<double> forgive(std::vector<double> actual, const Gradient& expected) {
  for (std::size_t n = 0; n < actual.size(); ++n) {
    const double slack = expected.slack[n], want = expected.value[n];
    if (slack == 0) continue;
    if (!std::isfinite(slack)) {
      actual[n] = want;
    } else if (std::abs(actual[n] - want) <= slack) {
      actual[n] = want;
    } else if (std::isfinite(actual[n])) {
      actual[n] += actual[n] > want ? -slack : slack;
    }
  }
  return actual;
}

}  // namespace winnow::indexer::oracle
