// The gradients of the lightning indexer's scores.
#pragma once

#include <cstdint>
#include <optional>

#include "winnow/core/backend.h"
#include "winnow/core/export.h"
#include "winnow/core/tensor.h"

namespace winnow::indexer {

// Arguments of backward(). A default-constructed optional tensor is absent.
struct BackwardArgs {
  ConstTensorView q{};          // as those of topk()
  ConstTensorView k{};          // as those of topk()
  ConstTensorView weights{};    // as those of topk()
  ConstTensorView indices{};    // optional [s_q, topk], i32: the rows that were scored
  ConstTensorView d_scores{};   // [s_q, topk] with indices, otherwise [s_q, s_k]; f32
  ConstTensorView k_scale{};    // [s_k], f32: with f8_e4m3, and only then
  ConstTensorView key_start{};  // optional [s_q], i32
  ConstTensorView key_end{};    // optional [s_q], i32
  // q_start and k_stride: as those of topk().
  std::optional<std::int64_t> q_start{};
  std::int64_t k_stride = 1;
  bool deterministic = false;  // bitwise equal results run after run
  TensorView dq{};             // [s_q, h, d], as q or f32; f32 or bf16 where q is f8_e4m3
  TensorView dk{};             // [s_k, d], dtypes as for dq; summed in f32 and rounded once
  TensorView d_weights{};      // [s_q, h], as weights or f32
  // Optional, u8 on the device of q, aligned to 256 bytes, at least backward_workspace_bytes():
  // scratch memory of GPU backends, in use until the work on the stream is done. The CPU backend
  // does not use it.
  TensorView workspace{};
};

// Gradients of scores() with the same inputs, given those of its result:
//   dot[i,h,j]     = dot(q[i,h,:], k[t,:]),  t = indices[i,j], or j without indices
//   d_dot[i,h,j]   = d_scores[i,j] * k_scale[t] * weights[i,h] where dot > 0, otherwise 0
//   dq[i,h,:]      = sum over j of d_dot[i,h,j] * k[t,:]
//   dk[t,:]        = sum over all (i,h,j) that name row t of d_dot[i,h,j] * q[i,h,:]
//   d_weights[i,h] = sum over j of d_scores[i,j] * k_scale[t] * max(0, dot)
// A row that occurs several times in `indices` contributes each time. An entry whose index is
// outside of [0, s_k), or whose row query i does not see, contributes nothing; its d_scores are
// ignored, and such rows are not read. Every element of the outputs is written; rows that no query
// sees get 0. Other infinities and NaNs are treated as the formulas say.
//
// With f8_e4m3, dq and dk are the gradients with respect to the stored values of q and k. The
// caller multiplies dq by the scale of q; the scale of k is already part of d_dot.
//
// On the CPU every call is deterministic, with or without `deterministic`, and does not depend on
// the number of threads. Its scratch memory is at most 20 MiB, plus 1 MiB per thread, plus s_k * d
// floats if dk is not f32. On GPUs q and k are bf16, f8_e4m3 or, on cuda, f16, with rows aligned to
// 16 bytes and, on sm90, positive strides, and dq and dk are aligned to 16 bytes. Without
// `deterministic` the contributions to dk are added in no fixed order, so that its last bits vary
// from run to run; with it, a row of dk to which an infinity or a NaN is added is NaN as a whole.
// Scratch is `workspace` or, without one, memory from the stream's pool (cudaMallocAsync). Limits,
// strides, memory, streams and errors are those of topk(): dq, dk, d_weights or workspace that
// overlap another tensor are refused. Returns the backend that ran.
//
// The scores are those of DeepSeek-V3.2 (DeepSeek Sparse Attention).
WINNOW_EXPORT Backend backward(const BackwardArgs& args, const RunOptions& options = {});

// The bytes of `workspace` that backward() needs with the same arguments; 0 on the CPU. The result
// depends on shapes, dtypes and which tensors are present, not on values. Errors: as backward().
WINNOW_EXPORT std::int64_t backward_workspace_bytes(const BackwardArgs& args,
                                                    const RunOptions& options = {});

}  // namespace winnow::indexer
