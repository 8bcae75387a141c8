#include "model.h"

#include <algorithm>
#include <cmath>

namespace {

using winnow::ConstTensorView;
using winnow::DType;
using winnow::Tensor;
using winnow::TensorView;

constexpr std::int64_t kRow = 576;     // columns of a latent row and of a query
constexpr std::int64_t kRotated = 64;  // the last of them, rotated by the position
constexpr std::int64_t kValue = winnow::sparse_mla::kValueDim;

template <class T>
T* data(Tensor& tensor) {
  return static_cast<T*>(tensor.data());
}
template <class T>
T* data(const TensorView& view) {
  return static_cast<T*>(view.data());
}
template <class T>
const T* data(const ConstTensorView& view) {
  return static_cast<const T*>(view.data());
}

ConstTensorView transposed(const Tensor& matrix) { return matrix.view().transpose(0, 1); }

// Rows of `heads` vectors, [tokens, heads * d], as [tokens, heads, d].
TensorView by_head(Tensor& rows, std::int64_t heads) {
  return TensorView(rows.data(), rows.dtype(), {rows.size(0), heads, rows.size(1) / heads},
                    rows.device());
}
ConstTensorView by_head(const Tensor& rows, std::int64_t heads) {
  return ConstTensorView(rows.data(), rows.dtype(), {rows.size(0), heads, rows.size(1) / heads},
                         rows.device());
}

}  // namespace

Parameter::Parameter(Machine& machine, std::int64_t inputs, std::int64_t outputs,
                     std::int64_t active_inputs, std::mt19937_64& random)
    : gradient(DType::f32, {inputs, outputs}, machine.device()),
      mean(gradient.clone()),
      square(gradient.clone()),
      active(active_inputs) {
  Tensor start(DType::f32, {inputs, outputs});
  std::normal_distribution<float> normal(0, 1 / std::sqrt(static_cast<float>(active)));
  for (float& weight : start.values<float>()) weight = normal(random);
  value = start.to(machine.device());
}

void Parameter::update(Machine& machine, double rate) {
  ++steps;
  machine.for_each_row(
      value.size(0),
      AdamUpdate{.value = data<float>(value),
                 .mean = data<float>(mean),
                 .square = data<float>(square),
                 .gradient = data<float>(gradient),
                 .columns = value.size(1),
                 .rate = static_cast<float>(rate / static_cast<double>(active)),
                 .mean_correction = 1 / (1 - std::pow(AdamUpdate::kMeanDecay, float(steps))),
                 .square_correction = 1 / (1 - std::pow(AdamUpdate::kSquareDecay, float(steps)))});
}

Tensor Model::matrix(std::int64_t rows, std::int64_t columns) const {
  return Tensor(DType::f32, {rows, columns}, machine_.device());
}

Tensor Model::attention_matrix(std::int64_t rows, std::int64_t columns) const {
  if (shape_.dtype == DType::f32) return Tensor();
  return Tensor(shape_.dtype, {rows, columns}, machine_.device());
}

Model::Model(Machine& machine, const ModelShape& s, std::uint64_t seed)
    : machine_(machine),
      shape_(s),
      random_(seed),
      embedding_(machine, s.context * kBytes, s.width, s.context, random_),
      query_(machine, s.width, s.heads * kRow, s.width, random_),
      latent_(machine, s.width, kRow, s.width, random_),
      output_(machine, s.heads * kValue, s.width, s.heads * kValue, random_),
      unembed_(machine, s.width, kBytes, s.width, random_),
      index_query_(machine, s.width, s.index_heads * s.index_width, s.width, random_),
      index_key_(machine, s.width, s.index_width, s.width, random_),
      index_weight_(machine, s.width, s.index_heads, s.width, random_),
      chosen_(DType::i32, {s.tokens, s.topk}, machine.device()),
      length_(DType::i32, {s.tokens}, machine.device()),
      hot_(matrix(s.tokens, s.context * kBytes)),
      x_(matrix(s.tokens, s.width)),
      y_(matrix(s.tokens, s.width)),
      logits_(matrix(s.tokens, kBytes)),
      losses_(matrix(s.tokens, 1)),
      lse_(matrix(s.tokens, s.heads)),
      q_(matrix(s.tokens, s.heads * kRow)),
      kv_(matrix(s.tokens, kRow)),
      out_(matrix(s.tokens, s.heads * kValue)),
      d_q_(matrix(s.tokens, s.heads * kRow)),
      d_kv_(matrix(s.tokens, kRow)),
      d_out_(matrix(s.tokens, s.heads * kValue)),
      d_y_(matrix(s.tokens, s.width)),
      narrow_q_(attention_matrix(s.tokens, s.heads * kRow)),
      narrow_kv_(attention_matrix(s.tokens, kRow)),
      narrow_out_(attention_matrix(s.tokens, s.heads * kValue)),
      narrow_d_out_(attention_matrix(s.tokens, s.heads * kValue)),
      index_q_(matrix(s.tokens, s.index_heads * s.index_width)),
      index_k_(matrix(s.tokens, s.index_width)),
      index_w_(matrix(s.tokens, s.index_heads)),
      scores_(matrix(s.tokens, std::max(s.tokens, s.topk))),
      teacher_(matrix(s.tokens, std::max(s.tokens, s.topk))),
      narrow_index_q_(attention_matrix(s.tokens, s.index_heads * s.index_width)),
      narrow_index_k_(attention_matrix(s.tokens, s.index_width)),
      d_index_q_(matrix(s.tokens, s.index_heads * s.index_width)),
      d_index_k_(matrix(s.tokens, s.index_width)),
      d_index_w_(matrix(s.tokens, s.index_heads)),
      d_scores_(matrix(s.tokens, std::max(s.tokens, s.topk))) {
  // Every query names every token; the causal limit of the attention hides the later ones.
  Tensor all(DType::i32, {s.tokens, s.tokens}), first(DType::i32, {s.tokens});
  Tensor last = first.clone();
  for (std::int64_t t = 0; t < s.tokens; ++t) {
    for (std::int64_t j = 0; j < s.tokens; ++j) {
      all.view().at<std::int32_t>(t, j) = static_cast<std::int32_t>(j);
    }
    first.view().at<std::int32_t>(t) = 0;
    last.view().at<std::int32_t>(t) = static_cast<std::int32_t>(s.tokens);
  }
  everything_ = all.to(machine.device());
  first_ = first.to(machine.device());
  last_ = last.to(machine.device());
}

void Model::project(const ConstTensorView& text) {
  text_ = text;
  machine_.for_each_row(shape_.tokens,
                        OneHot{data<std::uint8_t>(text), data<float>(hot_), shape_.context});
  machine_.multiply(hot_, embedding_.value, x_);
  machine_.multiply(x_, query_.value, q_);
  machine_.multiply(x_, latent_.value, kv_);
  rotate_attention(q_, kv_, 1);
}

void Model::project_indexer() {
  machine_.multiply(x_, index_query_.value, index_q_);
  machine_.multiply(x_, index_key_.value, index_k_);
  machine_.multiply(x_, index_weight_.value, index_w_);
  rotate_indexer(index_q_, index_k_, 1);
  machine_.for_each_row(shape_.tokens,
                        Scale{data<float>(index_w_), shape_.index_heads, score_scale()});
  narrowed(index_q_, narrow_index_q_);
  narrowed(index_k_, narrow_index_k_);
}

void Model::choose() {
  const bool wide = shape_.dtype == DType::f32;
  winnow::indexer::topk({.q = by_head(wide ? index_q_ : narrow_index_q_, shape_.index_heads),
                         .k = wide ? index_k_ : narrow_index_k_,
                         .weights = index_w_,
                         .q_start = 0,
                         .indices = chosen_,
                         .length = length_});
}

void Model::attend_to_everything() {
  const bool wide = shape_.dtype == DType::f32;
  winnow::sparse_mla::forward({.q = by_head(wide ? q_ : narrow_q_, shape_.heads),
                               .kv = by_head(wide ? kv_ : narrow_kv_, 1),
                               .key_start = first_,
                               .key_end = last_,
                               .q_start = 0,
                               .out = by_head(wide ? out_ : narrow_out_, shape_.heads),
                               .lse = lse_});
}

double Model::predict(bool sparse) {
  sparse_ = sparse;
  const bool wide = shape_.dtype == DType::f32;
  narrowed(q_, narrow_q_);
  narrowed(kv_, narrow_kv_);
  if (sparse) {
    winnow::sparse_mla::forward({.q = by_head(wide ? q_ : narrow_q_, shape_.heads),
                                 .kv = by_head(wide ? kv_ : narrow_kv_, 1),
                                 .indices = chosen_,
                                 .q_start = 0,
                                 .out = by_head(wide ? out_ : narrow_out_, shape_.heads),
                                 .lse = lse_});
  } else {
    attend_to_everything();
  }
  if (!wide) {
    machine_.for_each_row(shape_.tokens * shape_.heads,
                          Widen{data<winnow::BFloat16>(narrow_out_), data<float>(out_), kValue});
  }
  machine_.for_each_row(shape_.tokens, Copy{data<float>(x_), data<float>(y_), shape_.width});
  machine_.multiply(out_, output_.value, y_, true);
  machine_.multiply(y_, unembed_.value, logits_);
  machine_.for_each_row(shape_.tokens,
                        CrossEntropy{data<std::uint8_t>(text_), data<float>(logits_),
                                     data<float>(losses_), 1 / static_cast<float>(shape_.tokens)});
  return mean_loss();
}

void Model::learn() {
  const Tensor& d_logits = logits_;  // predict() left the gradient there
  machine_.multiply(transposed(y_), d_logits, unembed_.gradient);
  machine_.multiply(d_logits, transposed(unembed_.value), d_y_);
  machine_.multiply(transposed(out_), d_y_, output_.gradient);
  machine_.multiply(d_y_, transposed(output_.value), d_out_);

  const bool wide = shape_.dtype == DType::f32;
  winnow::sparse_mla::backward({.q = by_head(wide ? q_ : narrow_q_, shape_.heads),
                                .kv = by_head(wide ? kv_ : narrow_kv_, 1),
                                .indices = sparse_ ? chosen_ : everything_,
                                .out = by_head(wide ? out_ : narrow_out_, shape_.heads),
                                .lse = lse_,
                                .d_out = by_head(narrowed(d_out_, narrow_d_out_), shape_.heads),
                                .q_start = 0,
                                .deterministic = shape_.deterministic,
                                .dq = by_head(d_q_, shape_.heads),
                                .dkv = by_head(d_kv_, 1)});

  rotate_attention(d_q_, d_kv_, -1);
  machine_.multiply(transposed(x_), d_q_, query_.gradient);
  machine_.multiply(transposed(x_), d_kv_, latent_.gradient);
  Tensor& d_x = d_y_;  // y = x + ..., so d_y is a part of d_x
  machine_.multiply(d_q_, transposed(query_.value), d_x, true);
  machine_.multiply(d_kv_, transposed(latent_.value), d_x, true);
  machine_.multiply(transposed(hot_), d_x, embedding_.gradient);
}

double Model::teach() {
  const bool wide = shape_.dtype == DType::f32;
  const std::int64_t columns = sparse_ ? shape_.topk : shape_.tokens;
  const TensorView scores = narrow_matrix(scores_, columns);
  const TensorView attn_sum = narrow_matrix(teacher_, columns);
  const TensorView d_scores = narrow_matrix(d_scores_, columns);
  // The rows that predict() attended to: the chosen ones, or a range for each query.
  const ConstTensorView none, list = chosen_, first = first_, last = last_;
  const ConstTensorView indices = sparse_ ? list : none;
  const ConstTensorView key_start = sparse_ ? none : first, key_end = sparse_ ? none : last;
  const ConstTensorView q = by_head(wide ? index_q_ : narrow_index_q_, shape_.index_heads);
  const ConstTensorView k = wide ? index_k_ : narrow_index_k_;

  winnow::sparse_mla::distribution({.q = by_head(wide ? q_ : narrow_q_, shape_.heads),
                                    .kv = by_head(wide ? kv_ : narrow_kv_, 1),
                                    .indices = indices,
                                    .lse = lse_,
                                    .key_start = key_start,
                                    .key_end = key_end,
                                    .q_start = 0,
                                    .attn_sum = attn_sum});
  winnow::indexer::scores({.q = q,
                           .k = k,
                           .weights = index_w_,
                           .indices = indices,
                           .key_start = key_start,
                           .key_end = key_end,
                           .q_start = 0,
                           .scores = scores});
  machine_.for_each_row(shape_.tokens, IndexerLoss{.scores = data<float>(scores),
                                                   .teacher = data<float>(attn_sum),
                                                   .d_scores = data<float>(d_scores),
                                                   .losses = data<float>(losses_),
                                                   .columns = columns,
                                                   .scale = 1 / static_cast<float>(shape_.tokens)});
  winnow::indexer::backward({.q = q,
                             .k = k,
                             .weights = index_w_,
                             .indices = indices,
                             .d_scores = d_scores,
                             .key_start = key_start,
                             .key_end = key_end,
                             .q_start = 0,
                             .deterministic = shape_.deterministic,
                             .dq = by_head(d_index_q_, shape_.index_heads),
                             .dk = d_index_k_,
                             .d_weights = d_index_w_});
  rotate_indexer(d_index_q_, d_index_k_, -1);
  machine_.for_each_row(shape_.tokens,
                        Scale{data<float>(d_index_w_), shape_.index_heads, score_scale()});
  machine_.multiply(transposed(x_), d_index_q_, index_query_.gradient);
  machine_.multiply(transposed(x_), d_index_k_, index_key_.gradient);
  machine_.multiply(transposed(x_), d_index_w_, index_weight_.gradient);
  return mean_loss();
}

double Model::recall() {
  // The shares are of the attention to all rows, whose lse a dense predict() has left.
  if (sparse_) attend_to_everything();
  const bool wide = shape_.dtype == DType::f32;
  const TensorView attn_sum = narrow_matrix(teacher_, shape_.topk);
  winnow::sparse_mla::distribution({.q = by_head(wide ? q_ : narrow_q_, shape_.heads),
                                    .kv = by_head(wide ? kv_ : narrow_kv_, 1),
                                    .indices = chosen_,
                                    .lse = lse_,
                                    .q_start = 0,
                                    .attn_sum = attn_sum});
  machine_.for_each_row(shape_.tokens,
                        SumRow{data<float>(attn_sum), data<float>(losses_), shape_.topk});
  return mean_loss() / static_cast<double>(shape_.heads);
}

TensorView Model::narrow_matrix(Tensor& matrix, std::int64_t columns) {
  return TensorView(matrix.data(), DType::f32, {shape_.tokens, columns}, machine_.device());
}

void Model::rotate_attention(Tensor& q, Tensor& kv, float direction) {
  machine_.for_each_row(shape_.tokens,
                        Rotate{data<float>(q), shape_.heads, kRow, kRotated, direction});
  machine_.for_each_row(shape_.tokens, Rotate{data<float>(kv), 1, kRow, kRotated, direction});
}

// Half of the indexer's columns are rotated by the position.
void Model::rotate_indexer(Tensor& q, Tensor& key, float direction) {
  const std::int64_t columns = shape_.index_width;
  machine_.for_each_row(
      shape_.tokens, Rotate{data<float>(q), shape_.index_heads, columns, columns / 2, direction});
  machine_.for_each_row(shape_.tokens,
                        Rotate{data<float>(key), 1, columns, columns / 2, direction});
}

// Makes initial scores near 1 for any size of the indexer.
float Model::score_scale() const {
  return 1 / std::sqrt(static_cast<float>(shape_.index_heads * shape_.index_width));
}

// The inputs of the operations: `wide` itself in f32, else rounded.
const Tensor& Model::narrowed(const Tensor& wide, Tensor& narrow) {
  if (shape_.dtype == DType::f32) return wide;
  constexpr std::int64_t kColumns = 64;  // divides the columns of all tensors
  machine_.for_each_row(wide.numel() / kColumns,
                        Narrow{data<float>(wide.view()), data<winnow::BFloat16>(narrow), kColumns});
  return narrow;
}

double Model::mean_loss() const {
  const Tensor losses = losses_.to({});
  double sum = 0;
  for (const float loss : losses.values<float>()) sum += loss;
  return sum / static_cast<double>(shape_.tokens);
}
