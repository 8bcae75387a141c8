// The attention distribution of top-k sparse MLA attention, from which an indexer learns.
#pragma once

#include <cstdint>
#include <optional>

#include "winnow/core/backend.h"
#include "winnow/core/export.h"
#include "winnow/core/tensor.h"

namespace winnow::sparse_mla {

// Arguments of distribution(). A default-constructed optional tensor is absent.
struct DistributionArgs {
  ConstTensorView q{};            // [s_q, h_q, d_qk], f32, f16, bf16 or f64; d_qk is 576 or 512
  ConstTensorView kv{};           // [s_kv, 1, d_qk], as q
  ConstTensorView indices{};      // [s_q, 1, topk] or [s_q, topk], i32
  ConstTensorView lse{};          // [s_q, h_q], f32, natural logarithm, as forward() returns it
  ConstTensorView topk_length{};  // optional [s_q], i32
  std::optional<double> scale{};  // of the logits; 1 / sqrt(d_qk) if absent
  ConstTensorView key_start{};    // [s_q], i32: with key_end and in the place of `indices`, the
  ConstTensorView key_end{};      // [s_q], i32: range of the rows that each query attends to
  std::optional<std::int64_t> q_start{};  // position of query 0; switches the causal limit on
  std::int64_t k_stride = 1;  // tokens that one row of kv stands for; needs q_start if not 1
  // A second source of rows, attended in the same softmax; with a list or a range of its own.
  ConstTensorView extra_kv{};           // optional [s_extra, 1, d_qk], as q
  ConstTensorView extra_indices{};      // [s_q, 1, extra_topk] or [s_q, extra_topk], i32
  ConstTensorView extra_topk_length{};  // optional [s_q], i32
  ConstTensorView extra_key_start{};    // [s_q], i32: with extra_key_end and in the place of
  ConstTensorView extra_key_end{};      // [s_q], i32: extra_indices
  std::int64_t extra_k_stride = 1;      // as k_stride, of a row of extra_kv
  TensorView attn_sum{};                // [s_q, topk], f32; without indices [s_q, s_kv]
  // With extra_kv: [s_q, extra_topk], f32; without extra_indices [s_q, s_extra]
  TensorView extra_attn_sum{};
};

// The attention weight of each chosen row, summed over the heads:
//   attn_sum[i,j] = sum over h of exp(x[i,h,j] - lse[i,h]),  0 for entries that are not visible
// with x and visibility as in forward(). If `lse` is the result of forward() on the same entries,
// each row sums to h_q (to 0 without visible entries). Multiply an lse in base 2 by ln 2 first.
//
// Without `indices`, but with key_start and key_end, it is the distribution over all visible rows:
// attn_sum[i,t] of row t, 0 where query i does not see it.
//
// With extra_kv, see forward(), extra_attn_sum is the same of its entries: the two rows of a query
// together sum to h_q. Since `lse` is given, a call with one of the sources alone gives its part of
// the distribution as well.
//
// Repeated calls give bitwise equal results, on the CPU with any number of threads.
// On GPUs q, kv and extra_kv are bf16, or f16 on the backend cuda, with rows aligned to 16 bytes,
// and topk (dense: s_kv), with extra_topk (s_extra) added, and s_q * h_q are up to 2^30; heads are
// padded to 64, beyond 64 to a multiple of 128. The call allocates nothing and does not wait. With
// f64, which is for the CPU, lse and attn_sum are f64. Shapes, strides, memory, streams and errors:
// as forward(): an attn_sum that overlaps an input is refused. Returns the backend that ran.
//
// Defined by DeepSeek-V3.2: DeepSeek Sparse Attention trains its indexer by the KL divergence from
// this distribution.
WINNOW_EXPORT Backend distribution(const DistributionArgs& args, const RunOptions& options = {});

}  // namespace winnow::sparse_mla
