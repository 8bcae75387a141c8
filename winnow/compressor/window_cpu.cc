#include "winnow/compressor/window_cpu.h"

#include <cmath>

#include "winnow/cpu/convert.h"
#include "winnow/cpu/exp.h"

namespace winnow::compressor {

template <class Real>
Window<Real>::Window(const Problem& problem)
    : problem_(problem),
      kv_(problem.slots(), problem.d),
      gate_(problem.slots(), problem.d),
      largest_(problem.d),
      total_(problem.d),
      sum_(problem.d),
      result_(problem.d) {}

template <class Real>
void Window<Real>::load_token(std::int64_t token, std::int64_t place, std::int64_t first,
                              std::int64_t count, Real* kv, Real* gate) const {
  const Problem& p = problem_;
  load_real(p.dtype, p.kv.data, p.kv.offset(token) + first, count, kv);
  load_real(p.dtype, p.gate.data, p.gate.offset(token) + first, count, gate);
  const auto& bias = p.position_bias.as<const Real>();
  Eigen::Map<Row>(gate, count) +=
      Eigen::Map<const Row>(bias.data + bias.offset(place) + first, count);
}

template <class Real>
void Window<Real>::load(const Sequence& sequence, std::int64_t w) {
  const std::int64_t ratio = problem_.ratio, d = problem_.d;
  const std::int64_t own = problem_.slots() - ratio;  // the first slot of the window's own tokens
  const std::int64_t token = sequence.token + w * ratio;
  for (std::int64_t j = 0; j < ratio; ++j) {
    if (own > 0 && w > 0) load_token(token - ratio + j, j, 0, d, kv(j), gate(j));
    load_token(token + j, j, (problem_.series() - 1) * d, d, kv(own + j), gate(own + j));
  }
}

template <class Real>
void Window<Real>::sum(std::int64_t first) {
  first_ = first;
  largest_ = gate_.row(first);
  for (std::int64_t j = first + 1; j < gate_.rows(); ++j) largest_ = largest_.max(gate_.row(j));
  total_.setZero();
  sum_.setZero();
  for (std::int64_t j = first; j < gate_.rows(); ++j) {
    gate_.row(j) = exp_of(gate_.row(j) - largest_);
    total_ += gate_.row(j);
    sum_ += gate_.row(j) * kv_.row(j);
  }
  sum_ /= total_;
}

template <class Real>
const typename Window<Real>::Row& Window<Real>::finish(std::int64_t position) {
  result_ = sum_;
  if (problem_.norm_weight != nullptr) result_ *= rstd() * norm_weight();
  rotate(position, 1, result_);
  transform(result_);
  return result_;
}

template <class Real>
Real Window<Real>::rstd() const {
  const Real mean = sum_.square().sum() / static_cast<Real>(problem_.d);
  return 1 / std::sqrt(mean + static_cast<Real>(problem_.eps));
}

template <class Real>
void Window<Real>::finish_backward(std::int64_t position, const Row& row, Real rstd, Row& gradient,
                                   Row& d_norm_weight) const {
  const bool norm = problem_.norm_weight != nullptr;
  // The mean of the normalised sum times its gradient: a transform and a rotation of both keep it.
  const Real mean = norm ? (row * gradient).sum() / static_cast<Real>(problem_.d) : 0;
  transform(gradient);  // the matrix is symmetric
  rotate(position, -1, gradient);
  if (!norm) return;
  d_norm_weight += gradient * sum_ * rstd;
  gradient = rstd * (gradient * norm_weight() - sum_ * (rstd * mean));
}

template <class Real>
void Window<Real>::sum_backward(const Row& gradient) {
  for (std::int64_t j = first_; j < gate_.rows(); ++j) {
    result_ = gate_.row(j) / total_ * gradient;  // of kv
    gate_.row(j) = result_ * (kv_.row(j) - sum_);
    kv_.row(j) = result_;
  }
}

// Turns each pair by its angle times `sign`.
template <class Real>
void Window<Real>::rotate(std::int64_t position, Real sign, Row& row) const {
  if (problem_.pairs == 0) return;
  const auto& cos = problem_.cos.as<const Real>();
  const auto& sin = problem_.sin.as<const Real>();
  const Real* c = cos.data + cos.offset(position);
  const Real* s = sin.data + sin.offset(position);
  Real* pair = row.data() + problem_.d - 2 * problem_.pairs;
  for (std::int64_t k = 0; k < problem_.pairs; ++k, pair += 2) {
    const Real a = pair[0], b = pair[1], turned = sign * s[k];
    pair[0] = a * c[k] - b * turned;
    pair[1] = a * turned + b * c[k];
  }
}

// The product with Sylvester's matrix over sqrt(d), by butterflies.
template <class Real>
void Window<Real>::transform(Row& row) const {
  if (!problem_.hadamard) return;
  const std::int64_t d = problem_.d;
  for (std::int64_t half = 1; half < d; half *= 2) {
    for (Real* block = row.data(); block < row.data() + d; block += 2 * half) {
      for (std::int64_t i = 0; i < half; ++i) {
        const Real a = block[i], b = block[half + i];
        block[i] = a + b;
        block[half + i] = a - b;
      }
    }
  }
  row *= 1 / std::sqrt(static_cast<Real>(d));
}

template class Window<float>;
template class Window<double>;

}  // namespace winnow::compressor
