// The indexer: a small linear model that guesses which earlier tokens a query will attend to.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tools/winnow/demo/random.h"
#include "tools/winnow/demo/selection.h"
#include <Eigen/Core>

namespace winnow::demo {

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using MatrixRef = Eigen::Ref<const Matrix>;

// What scoring some queries computed; the gradient needs it again.
struct Scores {
  std::vector<std::int64_t> positions;
  Matrix inputs;       // [queries, width], the rows of x at the positions
  Matrix query_codes;  // [queries, dim] = inputs * query_map^T
  Matrix key_codes;    // [tokens, dim] = x * key_map^T
  Matrix values;       // [queries, tokens] = query_codes * key_codes^T
};

struct IndexerGradient {
  double loss = 0;  // KL(teacher || softmax of the scores over the entries), mean of the queries
  Matrix query_map;
  Matrix key_map;
};

// score[t, s] = (A x_t) . (B x_s) with x the latent rows. DSA's indexer has several such products
// per query, each cut off below 0 and weighted; one without a cut is enough to show how it learns.
class Indexer {
 public:
  // Small random maps: the scores begin near 0 and say nothing.
  Indexer(std::int64_t width, std::int64_t dim, Random& random);

  Scores score(const MatrixRef& x, std::span<const std::int64_t> positions) const;

  // `teacher` has a probability for each of `entries`, which must be of the positions of `scores`;
  // entries of -1 take no part.
  IndexerGradient gradient(const MatrixRef& x, const Scores& scores, const Selection& entries,
                           std::span<const float> teacher) const;

  Matrix query_map;  // A: [dim, width]
  Matrix key_map;    // B: [dim, width]
};

// The topk earlier tokens with the highest scores.
Selection choose_by_score(const Scores& scores, std::int64_t topk);

// Adam with bias correction.
class Adam {
 public:
  explicit Adam(const Indexer& indexer);
  void update(Indexer& indexer, const IndexerGradient& gradient, double learning_rate);

 private:
  struct Moments {
    Matrix mean;
    Matrix square;
  };
  void update(Matrix& weights, Moments& moments, const Matrix& gradient, double learning_rate);

  Moments query_map_;
  Moments key_map_;
  int step_ = 0;
};

}  // namespace winnow::demo
