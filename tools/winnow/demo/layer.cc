#include "tools/winnow/demo/layer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>

namespace winnow::demo {

Tensor unwritten(std::initializer_list<std::int64_t> shape) {
  Tensor result(DType::f32, shape);
  const std::span<float> values = result.values<float>();
  std::fill(values.begin(), values.end(), std::numeric_limits<float>::quiet_NaN());
  return result;
}

Tensor gather_queries(const Tensor& q, std::span<const std::int64_t> positions) {
  Tensor result(DType::f32, {static_cast<std::int64_t>(positions.size()), kHeads, kRowDim});
  const float* from = q.values<float>().data();
  float* to = result.values<float>().data();
  for (const std::int64_t position : positions) {
    to = std::copy_n(from + position * kHeads * kRowDim, kHeads * kRowDim, to);
  }
  return result;
}

namespace {

// The queries of a selection: a window on q where they follow one another, which also lets the
// operations apply the causal limit; else a copy of the rows.
struct SelectedQueries {
  SelectedQueries(const Tensor& all, std::span<const std::int64_t> positions) {
    const std::int64_t count = static_cast<std::int64_t>(positions.size());
    bool consecutive = count > 0;
    for (std::int64_t i = 1; i < count; ++i) {
      consecutive = consecutive && positions[i] == positions[0] + i;
    }
    if (consecutive) {
      view = all.view().slice(0, positions[0], positions[0] + count);
      q_start = positions[0];
    } else {
      copy = gather_queries(all, positions);
      view = copy;
    }
  }
  Tensor copy;
  ConstTensorView view;
  std::optional<std::int64_t> q_start;
};

}  // namespace

Layer::Layer(Embedding embedding, const RunOptions& options)
    : embedding_(std::move(embedding)), options_(options) {}

Eigen::Map<const Matrix> Layer::rows() const {
  return {embedding_.kv.values<float>().data(), tokens(), kRowDim};
}

LayerOutput Layer::forward(const Selection& selection) {
  const std::int64_t queries = static_cast<std::int64_t>(selection.positions.size());
  const SelectedQueries selected(embedding_.q, selection.positions);
  LayerOutput result = {unwritten({queries, kHeads, sparse_mla::kValueDim}),
                        unwritten({queries, kHeads})};
  note(sparse_mla::forward({.q = selected.view,
                            .kv = embedding_.kv,
                            .indices = selection.view(),
                            .q_start = selected.q_start,
                            .out = result.out,
                            .lse = result.lse},
                           options_));
  return result;
}

Tensor Layer::distribution(const Selection& selection, const Tensor& lse) {
  const SelectedQueries selected(embedding_.q, selection.positions);
  Tensor attn_sum = unwritten({selected.view.size(0), selection.topk});
  note(sparse_mla::distribution({.q = selected.view,
                                 .kv = embedding_.kv,
                                 .indices = selection.view(),
                                 .lse = lse,
                                 .q_start = selected.q_start,
                                 .attn_sum = attn_sum},
                                options_));
  return attn_sum;
}

DenseAttention Layer::dense(std::span<const std::int64_t> positions) {
  const std::int64_t queries = static_cast<std::int64_t>(positions.size());
  DenseAttention result;
  result.positions.assign(positions.begin(), positions.end());
  result.output = {unwritten({queries, kHeads, sparse_mla::kValueDim}),
                   unwritten({queries, kHeads})};
  result.attn_sum = unwritten({queries, tokens()});
  const Tensor q = gather_queries(embedding_.q, positions);
  // One list of all rows serves every query (stride 0); its length ends it at the query.
  std::vector<std::int32_t> all_rows(static_cast<std::size_t>(tokens()));
  std::iota(all_rows.begin(), all_rows.end(), 0);
  const ConstTensorView indices(all_rows.data(), DType::i32, {queries, 1, tokens()}, {0, 0, 1});
  Tensor lengths(DType::i32, {queries});
  for (std::int64_t i = 0; i < queries; ++i) {
    lengths.values<std::int32_t>()[i] = static_cast<std::int32_t>(positions[i] + 1);
  }
  note(sparse_mla::forward({.q = q,
                            .kv = embedding_.kv,
                            .indices = indices,
                            .topk_length = lengths,
                            .out = result.output.out,
                            .lse = result.output.lse},
                           options_));
  note(sparse_mla::distribution({.q = q,
                                 .kv = embedding_.kv,
                                 .indices = indices,
                                 .lse = result.output.lse,
                                 .topk_length = lengths,
                                 .attn_sum = result.attn_sum},
                                options_));
  return result;
}

double captured_share(const DenseAttention& dense, const Selection& selection) {
  double sum = 0;
  for (std::size_t i = 0; i < dense.positions.size(); ++i) {
    for (const std::int32_t token : selection.row(static_cast<std::int64_t>(i))) {
      if (token >= 0) sum += dense.share(static_cast<std::int64_t>(i), token);
    }
  }
  return sum / static_cast<double>(dense.positions.size());
}

double relative_error(const DenseAttention& dense, const Tensor& out) {
  const std::span<const float> wanted = dense.output.out.values<float>();
  const std::span<const float> got = out.values<float>();
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    difference += std::pow(double(got[i]) - double(wanted[i]), 2);
    size += std::pow(double(wanted[i]), 2);
  }
  return std::sqrt(difference / size);
}

}  // namespace winnow::demo
