// Top-k sparse MLA attention, backward.
#pragma once

#include <cstdint>
#include <optional>

#include "winnow/core/backend.h"
#include "winnow/core/export.h"
#include "winnow/core/tensor.h"

namespace winnow::sparse_mla {

// Arguments of backward(). A default-constructed optional tensor is absent.
struct BackwardArgs {
  ConstTensorView q{};            // [s_q, h_q, d_qk], f32, f16, bf16 or f64; d_qk is 576 or 512
  ConstTensorView kv{};           // [s_kv, 1, d_qk], as q
  ConstTensorView indices{};      // [s_q, 1, topk] or [s_q, topk], i32
  ConstTensorView out{};          // [s_q, h_q, 512], as q: the result of forward(). Not needed if
                                  // delta is given
  ConstTensorView lse{};          // [s_q, h_q], f32, natural logarithm, without the sink
  ConstTensorView d_out{};        // [s_q, h_q, 512], as q
  ConstTensorView topk_length{};  // optional [s_q], i32
  ConstTensorView attn_sink{};    // optional [h_q], f32
  ConstTensorView delta{};        // optional [s_q, h_q], f32: dot(out, d_out), computed if absent
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
  bool deterministic = false;           // bitwise equal results run after run
  TensorView dq{};                      // [s_q, h_q, d_qk], as q or f32
  TensorView dkv{};                     // [s_kv, 1, d_qk], as q (rounded once, at the end) or f32
  TensorView dextra_kv{};               // [s_extra, 1, d_qk], the same; only with extra_kv
  TensorView d_sink{};                  // optional [h_q], f32; only with attn_sink
  // Optional, u8 on the device of q, aligned to 256 bytes, at least backward_workspace_bytes():
  // scratch memory of GPU backends, in use until the work on the stream is done. The CPU backend
  // does not use it.
  TensorView workspace{};
};

// Gradients of forward()'s `out`, with x, visibility and lse' as there:
//   P = exp(x - lse'),  dP[i,h,j] = dot(d_out[i,h,:], kv[indices[i,j], :512])
//   dS = P * (dP - delta) * scale
//   dq[i,h,:] = sum_j dS * kv[indices[i,j], :]
//   dkv[t,:]  = sum over all (i,h,j) with indices[i,j] = t of dS * q[i,h,:],
//               and on its first 512 columns + P * d_out[i,h,:]
//   d_sink[h] = -sum_i exp(attn_sink[h] - lse'[i,h]) * delta[i,h]
// `out` and `lse` are used as passed. Every element of the outputs is written. Queries without
// visible entries and heads with a sink of +inf contribute exactly 0; rows that no query sees get
// 0. Ranges, and a second source, whose gradient is dextra_kv, are those of forward(); sm100
// refuses them.
//
// With f64, which is for the CPU, every tensor that is f32 above is f64.
//
// On the CPU every call is deterministic, with or without `deterministic`: the contributions to
// each row of dkv are summed in the order of the queries. CPU scratch memory grows with topk * d_qk
// (about 64 MiB or one query per thread, whichever is more; topk is s_kv without indices, and
// extra_topk comes on top), plus s_kv * d_qk floats if dkv is f16 or bf16, and so for dextra_kv.
// On GPUs q, kv, extra_kv, out and d_out are bf16 or f16, which sm90 and sm100 do not take; in f16
// dS beyond 65504 becomes infinite. Their rows and those of dq, dkv and dextra_kv are aligned to 16
// bytes; kv and extra_kv have up to 2^30 rows together; other limits are those of forward().
// Without `deterministic` the contributions to dkv are added in no fixed order, so that the last
// bits of dkv and dq vary from run to run. The scratch memory is `workspace` or, if that is absent,
// memory from the stream's pool (cudaMallocAsync), which a captured graph keeps as nodes of its
// own. Shapes, strides, memory, streams and errors: as forward(): dq, dkv, dextra_kv, d_sink or
// workspace that overlap another tensor are refused. Returns the backend that ran.
//
// The gradient of the attention defined by DeepSeek-V3.2 (DeepSeek Sparse Attention).
WINNOW_EXPORT Backend backward(const BackwardArgs& args, const RunOptions& options = {});

// The bytes of `workspace` that backward() needs with the same arguments; 0 on the CPU. The result
// depends on shapes, dtypes and which tensors are present, not on values. Errors: as backward().
WINNOW_EXPORT std::int64_t backward_workspace_bytes(const BackwardArgs& args,
                                                    const RunOptions& options = {});

}  // namespace winnow::sparse_mla
