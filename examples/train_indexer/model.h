// A byte-level language model with one layer of sparse MLA attention, and an indexer that learns
// which rows the attention should read. Gradients are written by hand; positions are rotary.
//
//   x = sum of the embeddings of a byte and those before   q = x Wq, kv = x Wkv
//   y = x + attention(q, kv, indices) Wo                   logits of the next byte = y Wu
//   indexer: score[t, s] = sum_j (x_t Ww)_j * relu((x_t Wiq)_j . (x_s Wik))
#pragma once

#include <array>
#include <cstdint>
#include <random>

#include "machine.h"

struct ModelShape {
  std::int64_t tokens = 128, heads = 4, width = 64, topk = 32;
  std::int64_t context = 4;  // bytes whose embeddings are summed, the current one included
  std::int64_t index_heads = 4, index_width = 64;
  winnow::DType dtype = winnow::DType::f32;  // of attention and indexer; bf16 on a GPU
  bool deterministic = true;                 // gradients do not depend on the order of additions
};

// A weight matrix with its gradient and the state of Adam. `active` is the number of inputs that
// are not 0 at a time. It scales the initial weights, so that inputs of magnitude 1 give outputs of
// magnitude 1, and divides the steps of Adam, so that one learning rate suits all shapes.
struct Parameter {
  Parameter(Machine& machine, std::int64_t inputs, std::int64_t outputs, std::int64_t active,
            std::mt19937_64& random);
  void update(Machine& machine, double rate);

  winnow::Tensor value, gradient, mean, square;  // [inputs, outputs]
  std::int64_t active;
  int steps = 0;
};

class Model {
 public:
  Model(Machine& machine, const ModelShape& shape, std::uint64_t seed);

  // The steps of one pass over `text`, tokens + 1 bytes, in the order in which they are called.
  // Computes x, q and kv.
  void project(const winnow::ConstTensorView& text);
  // Computes the indexer's queries, keys and weights.
  void project_indexer();
  // Chooses the topk tokens with the highest scores for every query.
  void choose();
  // Attends to the chosen tokens or to all, and returns the loss of predicting the next byte.
  double predict(bool sparse);
  // Computes the gradients of main() for that loss. The choice counts as a constant.
  void learn();
  // Returns KL(attention || indexer) over the tokens that predict() attended to, and computes the
  // gradients of indexer() for it. q, kv and x get no gradient from it.
  double teach();
  // Returns the share of the attention over all tokens that the chosen rows have.
  double recall();

  std::array<Parameter*, 5> main() { return {&embedding_, &query_, &latent_, &output_, &unembed_}; }
  std::array<Parameter*, 3> indexer() { return {&index_query_, &index_key_, &index_weight_}; }

 private:
  winnow::Tensor matrix(std::int64_t rows, std::int64_t columns) const;
  winnow::Tensor attention_matrix(std::int64_t rows, std::int64_t columns) const;
  // Attends to all earlier tokens, by ranges instead of indices, and stores its lse.
  void attend_to_everything();
  // A view [tokens, columns] of the memory of a larger matrix.
  winnow::TensorView narrow_matrix(winnow::Tensor& matrix, std::int64_t columns);
  void rotate_attention(winnow::Tensor& q, winnow::Tensor& kv, float direction);
  void rotate_indexer(winnow::Tensor& q, winnow::Tensor& key, float direction);
  const winnow::Tensor& narrowed(const winnow::Tensor& wide, winnow::Tensor& narrow);
  float score_scale() const;
  double mean_loss() const;

  Machine& machine_;
  const ModelShape shape_;
  std::mt19937_64 random_;
  Parameter embedding_, query_, latent_, output_, unembed_;
  Parameter index_query_, index_key_, index_weight_;

  bool sparse_ = false;
  winnow::ConstTensorView text_;
  winnow::Tensor everything_, chosen_;  // indices: [tokens, tokens] and [tokens, topk]
  winnow::Tensor length_;               // [tokens]: valid entries of the rows of chosen_
  winnow::Tensor first_, last_;         // [tokens]: the range of rows of a query: 0 and tokens
  winnow::Tensor hot_, x_, y_, logits_, losses_, lse_;
  // A row holds all heads of a token. The narrow_ matrices are copies in the attention's dtype, and
  // are empty if it is f32.
  winnow::Tensor q_, kv_, out_, d_q_, d_kv_, d_out_, d_y_;
  winnow::Tensor narrow_q_, narrow_kv_, narrow_out_, narrow_d_out_;
  winnow::Tensor index_q_, index_k_, index_w_, scores_, teacher_;
  winnow::Tensor narrow_index_q_, narrow_index_k_;
  winnow::Tensor d_index_q_, d_index_k_, d_index_w_, d_scores_;
};
