// The lightning indexer's choice: the rows with the largest scores, in bounded memory.
#pragma once

#include <cstdint>
#include <optional>

#include "winnow/core/backend.h"
#include "winnow/core/export.h"
#include "winnow/core/tensor.h"

namespace winnow::indexer {

// Which row is chosen between equal scores: the one with the smaller or with the larger index.
enum class Ties { smaller, larger };

// Arguments of topk(). A default-constructed optional tensor is absent.
struct TopkArgs {
  ConstTensorView q{};          // [s_q, h, d], f32, f16, bf16 or f8_e4m3; h 1 to 128, d 128 or 64
  ConstTensorView k{};          // [s_k, d], as q: one key for all heads
  ConstTensorView weights{};    // [s_q, h], f32 or bf16
  ConstTensorView k_scale{};    // [s_k], f32: with f8_e4m3, and only then
  ConstTensorView key_start{};  // optional [s_q], i32: the first row that query i sees
  ConstTensorView key_end{};    // optional [s_q], i32: the row after the last one
  std::optional<std::int64_t> q_start{};  // position of query 0; switches the causal limit on
  std::int64_t k_stride = 1;  // tokens that one row of k stands for; needs q_start if not 1
  Ties ties = Ties::smaller;
  TensorView indices{};  // [s_q, topk], i32; topk is 1 or more
  TensorView length{};   // [s_q], i32
  TensorView scores{};   // optional [s_q, topk], f32
  // Optional, u8 on the device of q, aligned to 256 bytes, at least topk_workspace_bytes(): scratch
  // memory of GPU backends, in use until the work on the stream is done. The CPU backend does not
  // use it.
  TensorView workspace{};
};

// The topk largest visible scores of every query:
//   I[i,t] = k_scale[t] * sum over h of weights[i,h] * max(0, dot(q[i,h,:], k[t,:]))
// with max(0, NaN) = NaN. The caller multiplies d^-0.5, h^-0.5 and the scale of a quantised q into
// `weights`.
//
// Query i sees the rows [max(0, key_start[i]), min(s_k, key_end[i])) that, with q_start, satisfy
// t <= floor((q_start + i + 1 - k_stride) / k_stride); no row if that range is empty. The contents
// of other rows have no effect.
//
// `length[i]` is the smaller of topk and the number of visible rows. `indices[i]` contains that
// many rows in ascending order, followed by -1, and `scores[i]` their scores, followed by -inf. The
// choice is exact for the computed scores (those of scores(), bit for bit) and the same in every
// run. Between equal scores the smaller row is chosen (unless Ties says otherwise). -0 equals 0;
// NaN ranks below -inf, and all NaNs are equal.
//
// Shapes: any s_q and s_k, 0 included. Strides: the innermost dimension is contiguous, the others
// are arbitrary. Memory: all tensors belong to the caller and live on one device; an output
// that overlaps another tensor is refused. The CPU backend allocates at most 8 MiB and 4 MiB per
// thread of scratch memory. On GPUs the scratch memory is `workspace` or, if that is absent, memory
// from the stream's pool (cudaMallocAsync): at most 256 MiB, regardless of the number of scores;
// but more on sm90 where topk exceeds 2^19, and on cuda 4 bytes for each row of k if that is more.
// On GPUs q and k are bf16, f8_e4m3 or, on cuda, f16, with rows aligned to 16 bytes and, on sm90,
// positive strides, and s_q and s_k are up to 2^30; sums of f8_e4m3 products keep fewer bits than
// f32 on sm90. The call does not wait, and the kernels read the ranges, so the stream may be in
// capture.
// Streams: see Stream. Thread-safe. Returns the backend that ran. Errors: Error (invalid_argument)
// naming the argument, before anything is written; Error (unsupported) if no backend, or not the
// forced one, can run it.
//
// Defined by DeepSeek-V3.2 (the lightning indexer of DeepSeek Sparse Attention).
WINNOW_EXPORT Backend topk(const TopkArgs& args, const RunOptions& options = {});

// The bytes of `workspace` that topk() needs with the same arguments; 0 on the CPU. The result
// depends on shapes, dtypes and the GPU, not on values. Errors: as topk().
WINNOW_EXPORT std::int64_t topk_workspace_bytes(const TopkArgs& args,
                                                const RunOptions& options = {});

}  // namespace winnow::indexer
