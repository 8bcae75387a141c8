// The lightning indexer: a small model that guesses which earlier tokens a query will attend to.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "tools/winnow/demo/matrix.h"
#include "tools/winnow/demo/random.h"
#include "tools/winnow/demo/selection.h"

namespace winnow::demo {

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
  std::vector<std::int32_t> ends;  // [queries]: the rows that a query sees end behind its own
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
