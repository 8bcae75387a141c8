#include "tools/winnow/demo/indexer.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "winnow/winnow.h"

namespace winnow::demo {
namespace {

Selection empty_selection(std::span<const std::int64_t> positions, std::int64_t topk) {
  Selection result;
  result.positions.assign(positions.begin(), positions.end());
  result.topk = topk;
  result.entries.assign(positions.size() * static_cast<std::size_t>(topk), -1);
  return result;
}

// Adds `count` random tokens of [0, position] that `taken` does not mark, in ascending order; each
// set of that size is equally likely.
void draw(std::int64_t position, std::int64_t count, const std::vector<char>& taken, Random& random,
          std::vector<std::int32_t>& tokens) {
  std::int64_t candidates = 0;
  for (std::int64_t token = 0; token <= position; ++token) candidates += taken[token] == 0;
  for (std::int64_t token = 0; token <= position && count > 0; ++token) {
    if (taken[token] != 0) continue;
    if (random.below(candidates) < count) {
      tokens.push_back(static_cast<std::int32_t>(token));
      --count;
    }
    --candidates;
  }
}

std::vector<char> marks(std::int64_t position, std::span<const std::int32_t> row) {
  std::vector<char> taken(static_cast<std::size_t>(position) + 1, 0);
  for (const std::int32_t token : row) {
    if (token >= 0) taken[token] = 1;
  }
  return taken;
}

}  // namespace

ConstTensorView Selection::view() const {
  return ConstTensorView(entries.data(), DType::i32, {std::ssize(positions), 1, topk});
}

Selection choose_best(std::span<const std::int64_t> positions, std::int64_t topk,
                      const TokenValue& value) {
  Selection result = empty_selection(positions, topk);
  std::vector<double> values;
  std::vector<std::int32_t> order;
  for (std::size_t i = 0; i < positions.size(); ++i) {
    const std::int64_t earlier = positions[i] + 1;
    values.resize(earlier);
    order.resize(earlier);
    for (std::int64_t token = 0; token < earlier; ++token) {
      const double v = value(static_cast<std::int64_t>(i), token);
      values[token] = std::isnan(v) ? -std::numeric_limits<double>::infinity() : v;
      order[token] = static_cast<std::int32_t>(token);
    }
    const std::int64_t count = std::min(topk, earlier);
    std::nth_element(order.begin(), order.begin() + (count - 1), order.end(),
                     [&](std::int32_t a, std::int32_t b) {
                       return values[a] != values[b] ? values[a] > values[b] : a > b;
                     });
    std::sort(order.begin(), order.begin() + count);
    std::copy_n(order.begin(), count, result.entries.begin() + static_cast<std::int64_t>(i) * topk);
  }
  return result;
}

Selection choose_recent(std::span<const std::int64_t> positions, std::int64_t topk) {
  return choose_best(positions, topk,
                     [](std::int64_t, std::int64_t token) { return static_cast<double>(token); });
}

Selection choose_random(std::span<const std::int64_t> positions, std::int64_t topk,
                        Random& random) {
  Selection result = empty_selection(positions, topk);
  std::vector<std::int32_t> tokens;
  for (std::size_t i = 0; i < positions.size(); ++i) {
    tokens.clear();
    draw(positions[i], topk, marks(positions[i], {}), random, tokens);
    std::copy(tokens.begin(), tokens.end(),
              result.entries.begin() + static_cast<std::int64_t>(i) * topk);
  }
  return result;
}

Selection with_exploration(const Selection& chosen, Random& random) {
  Selection result = empty_selection(chosen.positions, 2 * chosen.topk);
  std::vector<std::int32_t> tokens;
  for (std::size_t i = 0; i < chosen.positions.size(); ++i) {
    const std::span<const std::int32_t> row = chosen.row(static_cast<std::int64_t>(i));
    tokens.clear();
    for (const std::int32_t token : row) {
      if (token >= 0) tokens.push_back(token);
    }
    draw(chosen.positions[i], chosen.topk, marks(chosen.positions[i], row), random, tokens);
    std::sort(tokens.begin(), tokens.end());
    std::copy(tokens.begin(), tokens.end(),
              result.entries.begin() + static_cast<std::int64_t>(i) * result.topk);
  }
  return result;
}

bool is_sound(const Selection& selection) {
  for (std::size_t i = 0; i < selection.positions.size(); ++i) {
    std::int64_t count = 0;
    std::int32_t previous = -1;
    for (const std::int32_t token : selection.row(static_cast<std::int64_t>(i))) {
      if (token == -1) continue;
      if (token <= previous || token > selection.positions[i]) return false;
      previous = token;
      ++count;
    }
    if (count != std::min(selection.topk, selection.positions[i] + 1)) return false;
  }
  return true;
}

namespace {

constexpr double kInitialDeviation = 0.1;
constexpr double kMeanDecay = 0.9;
constexpr double kSquareDecay = 0.99;
constexpr double kTinySquare = 1e-8;

// Named, so that nothing else can run: the tensors are on the host.
const RunOptions kOnCpu{.backend = Backend::cpu};

TensorView view_of(Matrix& matrix) {
  return TensorView(matrix.data(), DType::f32, {matrix.rows(), matrix.cols()});
}
ConstTensorView view_of(const Matrix& matrix) {
  return ConstTensorView(matrix.data(), DType::f32, {matrix.rows(), matrix.cols()});
}

// The heads of each row, [rows, kIndexerHeads, kIndexerDim].
TensorView by_head(Matrix& matrix) {
  return TensorView(matrix.data(), DType::f32, {matrix.rows(), kIndexerHeads, kIndexerDim});
}

// The inputs that the operations have in common. The projections must outlive it.
struct Inputs {
  explicit Inputs(const Projections& p)
      : q(p.q.data(), DType::f32, {p.q.rows(), kIndexerHeads, kIndexerDim}),
        k(view_of(p.k)),
        weights(view_of(p.weights)),
        ends(p.ends.data(), DType::i32, {p.q.rows()}) {}
  ConstTensorView q, k, weights, ends;
};

ConstTensorView rows_of(const Selection& entries) {
  return ConstTensorView(entries.entries.data(), DType::i32,
                         {std::ssize(entries.positions), entries.topk});
}

}  // namespace

Matrix random_matrix(std::int64_t rows, std::int64_t columns, double deviation, Random& random) {
  Matrix result(rows, columns);
  testing::fill_normal(view_of(result), random, deviation);
  return result;
}

Indexer::Indexer(std::int64_t width, Random& random) {
  maps.query = random_matrix(kIndexerHeads * kIndexerDim, width, kInitialDeviation, random);
  maps.key = random_matrix(kIndexerDim, width, kInitialDeviation, random);
  maps.weight = random_matrix(kIndexerHeads, width, kInitialDeviation, random);
}

Projections Indexer::project(const MatrixRef& x, std::span<const std::int64_t> positions) const {
  Projections result;
  result.positions.assign(positions.begin(), positions.end());
  result.inputs.resize(std::ssize(positions), x.cols());
  for (std::size_t i = 0; i < positions.size(); ++i) {
    result.inputs.row(static_cast<std::int64_t>(i)) = x.row(positions[i]);
    result.ends.push_back(static_cast<std::int32_t>(positions[i] + 1));
  }
  result.q.noalias() = result.inputs * maps.query.transpose();
  result.k.noalias() = x * maps.key.transpose();
  result.weights.noalias() = result.inputs * maps.weight.transpose();
  return result;
}

IndexerGradient Indexer::gradient(const MatrixRef& x, const Projections& projections,
                                  const Selection& entries, std::span<const float> teacher) const {
  const std::int64_t queries = std::ssize(projections.positions);
  const Inputs inputs(projections);
  Matrix scores(queries, entries.topk);
  indexer::scores({.q = inputs.q,
                   .k = inputs.k,
                   .weights = inputs.weights,
                   .indices = rows_of(entries),
                   .key_end = inputs.ends,
                   .scores = view_of(scores)},
                  kOnCpu);

  // d loss / d score: softmax - teacher; entries of -1 have the score -inf.
  IndexerGradient result;
  Matrix d_scores(queries, entries.topk);
  for (std::int64_t i = 0; i < queries; ++i) {
    const double largest = double(scores.row(i).maxCoeff());
    double sum = 0;
    for (std::int64_t j = 0; j < entries.topk; ++j) sum += std::exp(double(scores(i, j)) - largest);
    for (std::int64_t j = 0; j < entries.topk; ++j) {
      const double wanted = teacher[static_cast<std::size_t>(i * entries.topk + j)];
      const double log_guess = double(scores(i, j)) - largest - std::log(sum);
      if (wanted > 0) result.loss += wanted * (std::log(wanted) - log_guess) / double(queries);
      d_scores(i, j) = static_cast<float>((std::exp(log_guess) - wanted) / double(queries));
    }
  }
  Matrix dq(queries, projections.q.cols()), dk(projections.k.rows(), kIndexerDim);
  Matrix d_weights(queries, kIndexerHeads);
  indexer::backward({.q = inputs.q,
                     .k = inputs.k,
                     .weights = inputs.weights,
                     .indices = rows_of(entries),
                     .d_scores = view_of(d_scores),
                     .key_end = inputs.ends,
                     .dq = by_head(dq),
                     .dk = view_of(dk),
                     .d_weights = view_of(d_weights)},
                    kOnCpu);
  result.maps.query.noalias() = dq.transpose() * projections.inputs;
  result.maps.key.noalias() = dk.transpose() * x;
  result.maps.weight.noalias() = d_weights.transpose() * projections.inputs;
  return result;
}

Selection choose_by_score(const Projections& projections, std::int64_t topk) {
  const std::int64_t queries = std::ssize(projections.positions);
  Selection result{.positions = projections.positions, .topk = topk, .entries = {}};
  result.entries.resize(static_cast<std::size_t>(queries * topk));
  std::vector<std::int32_t> length(static_cast<std::size_t>(queries));
  const Inputs inputs(projections);
  // Of equal scores the later token's, as of the other rules here.
  indexer::topk({.q = inputs.q,
                 .k = inputs.k,
                 .weights = inputs.weights,
                 .key_end = inputs.ends,
                 .ties = indexer::Ties::larger,
                 .indices = TensorView(result.entries.data(), DType::i32, {queries, topk}),
                 .length = TensorView(length.data(), DType::i32, {queries})},
                kOnCpu);
  return result;
}

Matrix all_scores(const Projections& projections) {
  const Inputs inputs(projections);
  Matrix scores(projections.inputs.rows(), projections.k.rows());
  indexer::scores({.q = inputs.q,
                   .k = inputs.k,
                   .weights = inputs.weights,
                   .key_end = inputs.ends,
                   .scores = view_of(scores)},
                  kOnCpu);
  return scores;
}

Adam::Adam(const Indexer& indexer) {
  const Matrix* maps[] = {&indexer.maps.query, &indexer.maps.key, &indexer.maps.weight};
  for (std::size_t i = 0; i < moments_.size(); ++i) {
    moments_[i].mean = Matrix::Zero(maps[i]->rows(), maps[i]->cols());
    moments_[i].square = moments_[i].mean;
  }
}

void Adam::update(Indexer& indexer, const IndexerGradient& gradient, double learning_rate) {
  ++step_;
  update(indexer.maps.query, moments_[0], gradient.maps.query, learning_rate);
  update(indexer.maps.key, moments_[1], gradient.maps.key, learning_rate);
  update(indexer.maps.weight, moments_[2], gradient.maps.weight, learning_rate);
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
