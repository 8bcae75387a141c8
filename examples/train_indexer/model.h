// A byte-level language model with one layer of sparse MLA attention, and the indexer that learns
// which rows the attention should look at. Gradients are written by hand.
//
//   x = embeddings of a byte and the ones before it        q = x Wq, kv = x Wkv, with positions
//   y = x + attention(q, kv, indices) Wo                   logits of the next byte = y Wu
//   indexer: score[t, s] = sum_j (x_t Ww)_j * relu((x_t Wiq)_j . (x_s Wik)), with positions
#pragma once

#include <array>
#include <cstdint>
#include <random>

#include "machine.h"

struct ModelShape {
  std::int64_t tokens = 128, heads = 4, width = 64, topk = 32;
  std::int64_t context = 4;  // bytes that an embedding sees
  std::int64_t index_heads = 4, index_width = 64;
  winnow::DType dtype = winnow::DType::f32;  // of attention and indexer; bf16 on a GPU
  bool deterministic = true;                 // backward adds in a fixed order
};

// A matrix of weights with its gradient and what Adam keeps. `active` inputs are not 0 at a time:
// the weights begin such that inputs near 1 give outputs near 1, and a step of Adam, which has the
// same size for every weight, is divided by it, so that one rate suits matrices of all shapes.
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
  // x, q and kv:
  void project(const winnow::ConstTensorView& text);
  // The indexer's queries, keys and weights:
  void project_indexer();
  // The topk tokens with the highest scores for every query:
  void choose();
  // Attention over the chosen tokens, or over all; returns the loss of predicting the next byte:
  double predict(bool sparse);
  // Gradients of main() for that loss, through the attention. The choice counts as given:
  void learn();
  // KL(attention || indexer) over the tokens that predict() attended to, and its gradients of
  // indexer(). Neither q, kv nor x learn from it:
  double teach();
  // Share of all attention, over all tokens, that the chosen rows hold:
  double recall();

  std::array<Parameter*, 5> main() { return {&embedding_, &query_, &latent_, &output_, &unembed_}; }
  std::array<Parameter*, 3> indexer() { return {&index_query_, &index_key_, &index_weight_}; }

 private:
  winnow::Tensor matrix(std::int64_t rows, std::int64_t columns) const;
  winnow::Tensor attention_matrix(std::int64_t rows, std::int64_t columns) const;
  // Attends to all earlier tokens without a list of them; leaves its lse.
  void attend_to_everything();
  // [tokens, columns] of a larger matrix's memory.
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
  winnow::Tensor length_;               // of the rows of chosen_
  winnow::Tensor first_, last_;         // of the rows that a query may see: 0 and tokens, [tokens]
  winnow::Tensor hot_, x_, y_, logits_, losses_, lse_;
  // One row holds all heads of a token. Those in the attention's dtype stay empty if it is f32.
  winnow::Tensor q_, kv_, out_, d_q_, d_kv_, d_out_, d_y_;
  winnow::Tensor narrow_q_, narrow_kv_, narrow_out_, narrow_d_out_;
  winnow::Tensor index_q_, index_k_, index_w_, scores_, teacher_;
  winnow::Tensor narrow_index_q_, narrow_index_k_;
  winnow::Tensor d_index_q_, d_index_k_, d_index_w_, d_scores_;
};
