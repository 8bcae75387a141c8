// Which earlier tokens each query may look at, the rules that choose them, and the lightning
// indexer: a small model that guesses which tokens a query will attend to.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include <Eigen/Core>

#include "winnow/core/tensor.h"
#include "winnow/testing/generate.h"

namespace winnow::demo {

using testing::Random;
using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using MatrixRef = Eigen::Ref<const Matrix>;

// Normally distributed numbers of mean 0.
Matrix random_matrix(std::int64_t rows, std::int64_t columns, double deviation, Random& random);

// The latent rows [tokens, 1, width] as a matrix [tokens, width].
inline Eigen::Map<const Matrix> rows_of(const Tensor& kv) {
  return {kv.values<float>().data(), kv.size(0), kv.size(2)};
}

// Row i lists `topk` rows of kv for the query at positions[i], in ascending order; the rest of a
// row with fewer earlier tokens is -1. "Earlier" includes the query's own token.
struct Selection {
  std::vector<std::int64_t> positions;
  std::int64_t topk = 0;
  std::vector<std::int32_t> entries;  // [positions.size(), topk]

  std::span<const std::int32_t> row(std::int64_t i) const {
    return {entries.data() + i * topk, static_cast<std::size_t>(topk)};
  }
  // As the operations take it: [s_q, 1, topk]. The selection must outlive the view.
  ConstTensorView view() const;
};

// value(i, token): higher is chosen; ties go to the later token, NaN counts as -inf.
using TokenValue = std::function<double(std::int64_t, std::int64_t)>;
Selection choose_best(std::span<const std::int64_t> positions, std::int64_t topk,
                      const TokenValue& value);
Selection choose_recent(std::span<const std::int64_t> positions, std::int64_t topk);
Selection choose_random(std::span<const std::int64_t> positions, std::int64_t topk, Random& random);

// `chosen` with up to chosen.topk random further tokens in each row, so that topk doubles.
Selection with_exploration(const Selection& chosen, Random& random);

// Whether every entry is an earlier token or -1, and each row has min(topk, earlier tokens) tokens,
// in ascending order.
bool is_sound(const Selection& selection);

inline constexpr std::int64_t kIndexerHeads = 4;
inline constexpr std::int64_t kIndexerDim = 64;

// The weights of the indexer, and with the same shapes their gradient.
struct IndexerMaps {
  Matrix query;   // [kIndexerHeads * kIndexerDim, width]
  Matrix key;     // [kIndexerDim, width]
  Matrix weight;  // [kIndexerHeads, width]

  std::int64_t size() const { return query.size() + key.size() + weight.size(); }
};

// What the operations of winnow/indexer take, for some queries.
struct Projections {
  std::vector<std::int64_t> positions;
  Matrix inputs;                   // [queries, width], the rows of x at the positions
  Matrix q;                        // [queries, kIndexerHeads * kIndexerDim]
  Matrix k;                        // [tokens, kIndexerDim]
  Matrix weights;                  // [queries, kIndexerHeads]
  std::vector<std::int32_t> ends;  // [queries]: end of the rows that a query sees
};

struct IndexerGradient {
  double loss = 0;  // KL(teacher || softmax of the scores over the entries), mean of the queries
  IndexerMaps maps;
};

// The indexer of DeepSeek Sparse Attention, over the latent rows x:
//   score[t, s] = sum over h of w[t, h] * max(0, q[t, h] . k[s]);   w, q, k: linear in x_t, x_t,
//   x_s
// It runs on the CPU backend, in f32.
class Indexer {
 public:
  // Small random maps: the scores begin near each other and say nothing.
  Indexer(std::int64_t width, Random& random);

  Projections project(const MatrixRef& x, std::span<const std::int64_t> positions) const;

  // `teacher` has a probability for each of `entries`, which must be of the positions of the
  // projections; entries of -1 take no part.
  IndexerGradient gradient(const MatrixRef& x, const Projections& projections,
                           const Selection& entries, std::span<const float> teacher) const;

  IndexerMaps maps;
};

// The topk earlier tokens with the highest scores.
Selection choose_by_score(const Projections& projections, std::int64_t topk);

// The scores of all earlier tokens, [queries, tokens]; -inf for later ones.
Matrix all_scores(const Projections& projections);

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

  std::array<Moments, 3> moments_;  // of the maps, in their order
  int step_ = 0;
};

}  // namespace winnow::demo
