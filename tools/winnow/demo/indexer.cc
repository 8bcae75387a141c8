#include "tools/winnow/demo/indexer.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace winnow::demo {
namespace {

constexpr double kInitialDeviation = 0.1;
constexpr double kMeanDecay = 0.9;
constexpr double kSquareDecay = 0.99;
constexpr double kTinySquare = 1e-8;

Matrix random_matrix(std::int64_t rows, std::int64_t columns, Random& random) {
  Matrix result(rows, columns);
  for (std::int64_t i = 0; i < result.size(); ++i) {
    result.data()[i] = static_cast<float>(kInitialDeviation * random.normal());
  }
  return result;
}

}  // namespace

Indexer::Indexer(std::int64_t width, std::int64_t dim, Random& random)
    : query_map(random_matrix(dim, width, random)), key_map(random_matrix(dim, width, random)) {}

Scores Indexer::score(const MatrixRef& x, std::span<const std::int64_t> positions) const {
  Scores result;
  result.positions.assign(positions.begin(), positions.end());
  result.inputs.resize(static_cast<std::int64_t>(positions.size()), x.cols());
  for (std::size_t i = 0; i < positions.size(); ++i) {
    result.inputs.row(static_cast<std::int64_t>(i)) = x.row(positions[i]);
  }
  result.query_codes.noalias() = result.inputs * query_map.transpose();
  result.key_codes.noalias() = x * key_map.transpose();
  result.values.noalias() = result.query_codes * result.key_codes.transpose();
  return result;
}

IndexerGradient Indexer::gradient(const MatrixRef& x, const Scores& scores,
                                  const Selection& entries, std::span<const float> teacher) const {
  IndexerGradient result;
  const std::int64_t queries = static_cast<std::int64_t>(scores.positions.size());
  // d loss / d score: softmax - teacher at the entries, 0 elsewhere.
  Matrix d_scores = Matrix::Zero(queries, x.rows());
  std::vector<double> weights(static_cast<std::size_t>(entries.topk));
  for (std::int64_t i = 0; i < queries; ++i) {
    const std::span<const std::int32_t> row = entries.row(i);
    double largest = -std::numeric_limits<double>::infinity();
    for (const std::int32_t token : row) {
      if (token >= 0) largest = std::max(largest, double(scores.values(i, token)));
    }
    double sum = 0;
    for (std::size_t j = 0; j < row.size(); ++j) {
      weights[j] = row[j] >= 0 ? std::exp(double(scores.values(i, row[j])) - largest) : 0.0;
      sum += weights[j];
    }
    for (std::size_t j = 0; j < row.size(); ++j) {
      if (row[j] < 0) continue;
      const double wanted = teacher[static_cast<std::size_t>(i * entries.topk) + j];
      const double guess = weights[j] / sum;
      if (wanted > 0) {
        const double log_guess = double(scores.values(i, row[j])) - largest - std::log(sum);
        result.loss += wanted * (std::log(wanted) - log_guess) / double(queries);
      }
      d_scores(i, row[j]) += static_cast<float>((guess - wanted) / double(queries));
    }
  }
  Matrix d_query_codes = d_scores * scores.key_codes;
  Matrix d_key_codes = d_scores.transpose() * scores.query_codes;
  result.query_map.noalias() = d_query_codes.transpose() * scores.inputs;
  result.key_map.noalias() = d_key_codes.transpose() * x;
  return result;
}

Selection choose_by_score(const Scores& scores, std::int64_t topk) {
  return choose_best(scores.positions, topk, [&](std::int64_t i, std::int64_t token) {
    return static_cast<double>(scores.values(i, token));
  });
}

Adam::Adam(const Indexer& indexer) {
  for (Moments* moments : {&query_map_, &key_map_}) {
    moments->mean = Matrix::Zero(indexer.query_map.rows(), indexer.query_map.cols());
    moments->square = moments->mean;
  }
}

void Adam::update(Indexer& indexer, const IndexerGradient& gradient, double learning_rate) {
  ++step_;
  update(indexer.query_map, query_map_, gradient.query_map, learning_rate);
  update(indexer.key_map, key_map_, gradient.key_map, learning_rate);
}

void Adam::update(Matrix& weights, Moments& moments, const Matrix& gradient, double learning_rate) {
  const float keep_mean = static_cast<float>(kMeanDecay);
  const float keep_square = static_cast<float>(kSquareDecay);
  moments.mean = keep_mean * moments.mean + (1 - keep_mean) * gradient;
  moments.square = keep_square * moments.square + (1 - keep_square) * gradient.cwiseAbs2();
  const double mean_scale = learning_rate / (1 - std::pow(kMeanDecay, step_));
  const double square_scale = 1 / (1 - std::pow(kSquareDecay, step_));
  const auto root = (static_cast<float>(square_scale) * moments.square.array()).sqrt();
  weights.array() -= static_cast<float>(mean_scale) * moments.mean.array() /
                     (root + static_cast<float>(kTinySquare));
}

}  // namespace winnow::demo
