// The attention layer of the demo: the operations of the library on the document's queries and
// rows, and what they are compared with.
#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <vector>

#include "tools/winnow/demo/embedding.h"
#include "tools/winnow/demo/indexer.h"
#include "tools/winnow/demo/selection.h"

#include "winnow/winnow.h"

namespace winnow::demo {

struct LayerOutput {
  Tensor out;  // [queries, kHeads, 512]
  Tensor lse;  // [queries, kHeads]
};

// Attention of some queries over all earlier tokens: what the indexer should find.
struct DenseAttention {
  std::vector<std::int64_t> positions;
  LayerOutput output;
  Tensor attn_sum;  // [queries, tokens], 0 after the query's position
  // Share of all heads' attention that the query at positions[i] pays to `token`.
  double share(std::int64_t i, std::int64_t token) const {
    return double(attn_sum.view().at<float>(i, token)) / double(kHeads);
  }
};

class Layer {
 public:
  Layer(Embedding embedding, const RunOptions& options);

  std::int64_t tokens() const { return embedding_.kv.size(0); }
  const Tensor& q() const { return embedding_.q; }
  const Tensor& kv() const { return embedding_.kv; }
  // The latent rows as a matrix [tokens, kRowDim].
  Eigen::Map<const Matrix> rows() const;
  // The operations, for the queries at the selection's positions. Outputs begin as NaN, so that a
  // value which an operation left out shows.
  LayerOutput forward(const Selection& selection);
  Tensor distribution(const Selection& selection, const Tensor& lse);
  DenseAttention dense(std::span<const std::int64_t> positions);

  // The backends that ran, as the operations reported.
  const std::set<Backend>& backends_used() const { return backends_used_; }
  void note(Backend backend) { backends_used_.insert(backend); }
  const RunOptions& run_options() const { return options_; }

 private:
  Embedding embedding_;
  RunOptions options_;
  std::set<Backend> backends_used_;
};

// The rows of q at the positions, [positions, kHeads, kRowDim].
Tensor gather_queries(const Tensor& q, std::span<const std::int64_t> positions);

// A tensor of NaN.
Tensor unwritten(std::initializer_list<std::int64_t> shape);

// Mean over the queries of the dense attention's share that falls on the selected tokens.
double captured_share(const DenseAttention& dense, const Selection& selection);

// |out - dense| / |dense|, the norms being over all queries of `dense`, to which the rows of
// `out` belong one by one.
double relative_error(const DenseAttention& dense, const Tensor& out);

}  // namespace winnow::demo
