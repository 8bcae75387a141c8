// Top-k sparse MLA attention, forward.
#pragma once

#include <cstdint>
#include <optional>

#include "winnow/core/backend.h"
#include "winnow/core/export.h"
#include "winnow/core/tensor.h"

namespace winnow::sparse_mla {

// Columns of a latent row that serve as the value.
inline constexpr std::int64_t kValueDim = 512;

// Arguments of forward(). A default-constructed optional tensor is absent.
struct ForwardArgs {
  ConstTensorView q{};        // [s_q, h_q, d_qk], f32, f16, bf16 or f64; d_qk is 576 or 512
  ConstTensorView kv{};       // [s_kv, 1, d_qk], as q: K is the row, V its first 512 columns
  ConstTensorView indices{};  // [s_q, 1, topk] or [s_q, topk], i32: the rows of each query
  ConstTensorView
      topk_length{};            // optional [s_q], i32: entries of each row of `indices` that count
  ConstTensorView attn_sink{};  // optional [h_q], f32: a logit per head without a value
  std::optional<double> scale{};  // of the logits; 1 / sqrt(d_qk) if absent
  ConstTensorView key_start{};  // [s_q], i32: with key_end and in the place of `indices`, the range
  ConstTensorView key_end{};    // [s_q], i32: of the rows that each query attends to
  std::optional<std::int64_t> q_start{};  // position of query 0; switches the causal limit on
  std::int64_t k_stride = 1;  // tokens that one row of kv stands for; needs q_start if not 1
  // A second source of rows, attended in the same softmax; with a list or a range of its own.
  ConstTensorView extra_kv{};           // optional [s_extra, 1, d_qk], as q
  ConstTensorView extra_indices{};      // [s_q, 1, extra_topk] or [s_q, extra_topk], i32
  ConstTensorView extra_topk_length{};  // optional [s_q], i32
  ConstTensorView extra_key_start{};    // [s_q], i32: with extra_key_end and in the place of
  ConstTensorView extra_key_end{};      // [s_q], i32: extra_indices
  std::int64_t extra_k_stride = 1;      // as k_stride, of a row of extra_kv
  // Whether every sum is formed in the order in which the list names rows, of both sources one
  // after the other, as decode() does with the same argument: both give the same bits of the same
  // rows in bf16. Without it a GPU may be faster.
  bool in_list_order = false;
  // Whether the lse of a query with nothing visible is +inf, as in FlashMLA, instead of -inf.
  bool flash_mla_lse = false;
  TensorView out{};         // [s_q, h_q, 512], as q
  TensorView max_logits{};  // optional [s_q, h_q], f32
  TensorView lse{};         // optional [s_q, h_q], f32
  // Optional, u8 on the device of q, aligned to 256 bytes, at least forward_workspace_bytes():
  // scratch memory of GPU backends, in use until the work on the stream is done. It makes calls
  // faster whose queries do not share out evenly, and changes no bit. The CPU backend does not use
  // it.
  TensorView workspace{};
};

// Attention of every query over the cache rows that an indexer chose for it:
//   x[i,h,j] = scale * dot(q[i,h,:], kv[indices[i,j],:])      over the visible entries j
//   max_logits = max_j x,   lse = log sum_j exp(x)   (natural logarithm, without the sink)
//   out = sum_j exp(x - lse') * kv[indices[i,j], :512]
// where lse' is lse, or log(exp(lse) + exp(attn_sink[h])) with a sink.
//
// An entry j < topk_length[i] (clamped to [0, topk]) is visible if 0 <= t = indices[i,j] < s_kv
// and, with q_start, t <= floor((q_start + i + 1 - k_stride) / k_stride), that is, if all k_stride
// tokens of the row are at or before the query. Other entries are ignored and their rows are not
// read. Each of several entries with the same row counts. A query without visible entries gets out
// = 0, max_logits = -inf and lse = -inf, or with flash_mla_lse +inf. A sink of -inf has no effect;
// a sink of +inf gives out = 0. NaN or infinity in a row affects only the queries that see the row.
// On the CPU a logit of -inf has weight 0, and a query whose logits are all -inf gets the results
// of one without visible entries. A logit of +inf gives lse = max_logits = +inf, a logit of NaN
// gives NaN for both, and out is NaN then. A sink of NaN makes out NaN where any entry has weight.
//
// Without `indices`, but with key_start and key_end, the attention is dense: the entries of query i
// are the rows t with max(0, key_start[i]) <= t < min(s_kv, key_end[i]), in order, and the causal
// limit applies as well. A key_start above its key_end means nothing visible. An indexer's warm-up
// trains on it, by chunks of queries; every row is gathered for every query.
//
// With extra_kv the entries of a query are those of kv and those of extra_kv: one softmax over
// both, with one sink. Each source has its own list or range, by the same rules: extra_indices name
// rows of extra_kv, and a row of it stands for extra_k_stride tokens, with the same q_start. The
// result is, up to rounding, that of one source with the rows of both.
//
// Dtypes: f64 is for the CPU; attn_sink, max_logits and lse are f64 then, and so are all sums. f32,
// f16 and bf16 are summed in f32.
// Shapes: any s_q, h_q, s_kv and topk, including 0. Strides: the innermost dimension is contiguous,
// the others are arbitrary (also 0 or negative; not 0 for outputs). Memory: all tensors belong to
// the caller and live on one device; an output that overlaps another tensor is refused, one that
// interleaves with it is not. The CPU backend allocates scratch memory that grows with
// num_threads() * (h_q + topk) (8 bytes per entry of topk, which is s_kv where the attention is
// dense, and of extra_topk), but not with s_q. Repeated calls give bitwise equal results, and those
// of a query do not depend on the other queries, nor on the CPU on the number of threads. On GPUs
// q, kv, extra_kv and out are bf16, or f16 on the backend cuda, with rows aligned to 16 bytes, and
// topk (dense: s_kv), with extra_topk (s_extra) added, and s_q * h_q are up to 2^30; heads are
// padded to a multiple of 64 internally. The call allocates nothing and does not wait, so the
// stream may be in capture. Streams: see Stream. Thread-safe. Returns the backend that ran. Errors:
// Error (invalid_argument) naming the argument, before anything is written; Error (unsupported) if
// no backend, or not the forced one, can run it.
//
// Defined by DeepSeek-V3.2 (DeepSeek Sparse Attention). The conventions are those of FlashMLA, with
// flash_mla_lse all of them.
WINNOW_EXPORT Backend forward(const ForwardArgs& args, const RunOptions& options = {});

// The bytes of `workspace` that forward() can use with the same arguments; 0 where it would not
// help, and on the CPU. The result depends on shapes and the device, not on values. Errors: as
// forward().
WINNOW_EXPORT std::int64_t forward_workspace_bytes(const ForwardArgs& args,
                                                   const RunOptions& options = {});

}  // namespace winnow::sparse_mla
