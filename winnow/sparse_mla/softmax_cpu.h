// The running softmax of forward and decode on the CPU: rows come in blocks, and the weighted
// values of a group of heads are kept relative to the largest logit so far. Internal.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include <Eigen/Core>

#include "winnow/cpu/exp.h"

namespace winnow::sparse_mla {

template <class Real>
using Matrix = Eigen::Matrix<Real, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
template <class Real>
using Vector = Eigen::Matrix<Real, Eigen::Dynamic, 1>;
using Index = Eigen::Index;

inline constexpr Index kValueColumns = 512;

// Cache rows that are worked on at once: with 576 floats each they stay in a 1 MiB L2 cache beside
// the logits.
inline constexpr Index kBlock = 192;

// How the heads of a query are shared out to work items. Items begin at multiples of eight heads
// and have at least eight, if there are as many: a head then has the same bits in every item, since
// Eigen multiplies so many together and what is left over one by one (test_same_bits.py).
struct HeadItems {
  static constexpr Index kLeast = 8;
  Index all, each, count;

  // Of `most` heads or fewer, the last one of up to seven more.
  HeadItems(Index heads, Index most)
      : all(heads),
        each(std::max(most / kLeast, Index{1}) * kLeast),
        count(std::max((heads / kLeast * kLeast + each - 1) / each, Index{1})) {}
  Index first(Index item) const { return item * each; }
  Index size(Index item) const { return item + 1 < count ? each : all - first(item); }
  Index most() const { return std::min(all, each + kLeast - 1); }
};

// The state of one query for a group of heads.
template <class Real>
struct RunningSoftmax {
  static constexpr Real kInfinity = std::numeric_limits<Real>::infinity();

  Matrix<Real> q;        // [heads, d_qk]
  Matrix<Real> rows;     // [kBlock, d_qk]
  Matrix<Real> weights;  // [heads, kBlock]: logits, then exp(logit - maximum)
  Matrix<Real> sum;      // [heads, 512]: weighted values
  Vector<Real> maximum, denominator;

  RunningSoftmax(Index heads, Index d_qk)
      : q(heads, d_qk),
        rows(kBlock, d_qk),
        weights(heads, kBlock),
        sum(heads, kValueColumns),
        maximum(heads),
        denominator(heads) {}

  void reset() {
    sum.setZero();
    maximum.setConstant(-kInfinity);
    denominator.setZero();
  }

  // Adds the first `count` rows of `rows`, for the first `heads` rows of `q`.
  void accumulate(Index heads, Index count, Real scale) {
    auto block_weights = weights.topLeftCorner(heads, count);
    const auto block = rows.topRows(count);
    block_weights.noalias() = q.topRows(heads) * block.transpose();
    for (Index h = 0; h < heads; ++h) {
      auto weight = block_weights.row(h).array();
      weight *= scale;
      const Real before = maximum[h];
      const Real largest = weight.template maxCoeff<Eigen::PropagateNaN>();
      const Real now = std::isnan(before) || before > largest ? before : largest;  // NaN stays
      if (now == -kInfinity) {  // all logits so far are -inf: nothing to weigh
        weight.setZero();
        continue;
      }
      const Real rescale = std::exp(before - now);
      weight = exp_of(weight - now);
      denominator[h] = denominator[h] * rescale + weight.sum();
      if (rescale != Real(1)) sum.row(h) *= rescale;
      maximum[h] = now;
    }
    sum.topRows(heads).noalias() += block_weights * block.leftCols(kValueColumns);
  }

  // Divides a head's weighted values by the denominator, the sink included; -inf: no sink. Returns
  // lse, without the sink, or `of_nothing` where that is -inf.
  Real finish(Index h, Real sink, Real of_nothing) {
    // An infinite maximum is the sum's logarithm; of a NaN among the logits the maximum is NaN.
    const Real lse = std::isinf(maximum[h]) ? maximum[h] : maximum[h] + std::log(denominator[h]);
    if (lse == -kInfinity || sink == kInfinity) {
      sum.row(h).setZero();
    } else {
      // exp(-lse') with both parts taken relative to the maximum, so that neither overflows.
      const Real shift = std::max(maximum[h], sink);
      const Real shrink = std::exp(maximum[h] - shift);
      sum.row(h) *= shrink / (denominator[h] * shrink + std::exp(sink - shift));
    }
    return lse == -kInfinity ? of_nothing : lse;
  }
};

}  // namespace winnow::sparse_mla
