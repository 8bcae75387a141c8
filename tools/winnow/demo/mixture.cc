#include "tools/winnow/demo/mixture.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <span>

#include "tools/winnow/demo/random.h"

namespace winnow::demo {
namespace {

constexpr std::uint64_t kSeed = 31;
constexpr std::int64_t kHidden = 64;
// Of what an expert adds to a token; keeps outputs far below kMostOutput.
constexpr double kOutputStrength = 0.5;

Matrix random_matrix(std::int64_t rows, std::int64_t columns, double deviation, Random& random) {
  Matrix result(rows, columns);
  for (std::int64_t i = 0; i < result.size(); ++i) {
    result.data()[i] = static_cast<float>(deviation * random.normal());
  }
  return result;
}

// The softmax of the scores in whole units: rounded down, and what is left goes to the first.
void write_weights(std::span<const float> scores, float* weights) {
  std::array<double, kExpertTopk> shares;
  double sum = 0;
  for (int k = 0; k < kExpertTopk; ++k) {
    sum += shares[k] = std::exp(double(scores[k]) - double(scores[0]));
  }
  float left = 1;
  for (int k = 1; k < kExpertTopk; ++k) {
    weights[k] = kWeightUnit * float(std::floor(shares[k] / sum / double(kWeightUnit)));
    left -= weights[k];
  }
  weights[0] = left;
}

}  // namespace

Mixture::Mixture(int experts, std::int64_t width) {
  Random random(kSeed);
  router_ = random_matrix(width, experts, 1, random);
  for (int i = 0; i < experts; ++i) {
    experts_.push_back(
        {random_matrix(width, kHidden, 1, random),
         random_matrix(kHidden, width, kOutputStrength / std::sqrt(double(kHidden)), random)});
  }
}

Routing Mixture::route(const MatrixRef& tokens) const {
  const Matrix scores = tokens * router_;
  Routing result{Tensor(DType::i32, {tokens.rows(), kExpertTopk}),
                 Tensor(DType::f32, {tokens.rows(), kExpertTopk})};
  std::vector<std::int32_t> order(experts_.size());
  for (std::int64_t t = 0; t < tokens.rows(); ++t) {
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + kExpertTopk, order.end(),
                      [&](std::int32_t a, std::int32_t b) {
                        return scores(t, a) != scores(t, b) ? scores(t, a) > scores(t, b) : a < b;
                      });
    std::array<float, kExpertTopk> best;
    for (int k = 0; k < kExpertTopk; ++k) {
      result.experts.values<std::int32_t>()[t * kExpertTopk + k] = order[k];
      best[k] = scores(t, order[k]);
    }
    write_weights(best, &result.weights.values<float>()[t * kExpertTopk]);
  }
  return result;
}

Matrix Mixture::apply(int expert, const MatrixRef& rows) const {
  const Matrix hidden = (rows * experts_[expert].up).cwiseMax(0.0f);
  Matrix result = hidden * experts_[expert].down;
  result.array() = (result.array() * (1 / kOutputUnit)).rint() * kOutputUnit;
  return result;
}

std::vector<double> Mixture::apply_plain(int expert, const float* row) const {
  const auto& [up, down] = experts_[expert];
  std::vector<double> result(down.cols());
  for (std::int64_t h = 0; h < kHidden; ++h) {
    double sum = 0;
    for (std::int64_t c = 0; c < up.rows(); ++c) sum += double(row[c]) * double(up(c, h));
    for (std::int64_t c = 0; c < down.cols(); ++c) {
      result[c] += std::max(sum, 0.0) * double(down(h, c));
    }
  }
  return result;
}

}  // namespace winnow::demo
