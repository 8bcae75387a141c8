// MLA attention of decode steps over a paged cache: over chosen rows, or over all of a sequence.
#pragma once

#include <cstdint>
#include <optional>

#include "winnow/cache/cache_format.h"
#include "winnow/core/backend.h"
#include "winnow/core/export.h"
#include "winnow/core/tensor.h"

namespace winnow::sparse_mla {

// Arguments of decode(). A default-constructed optional tensor is absent.
struct DecodeArgs {
  ConstTensorView q{};            // [b, s_q, h_q, d_qk], bf16; d_qk: the columns of a cache row
  ConstTensorView cache{};        // [blocks, block_size, 1, row], see CacheFormat
  ConstTensorView indices{};      // [b, s_q, topk], i32: the slots of each query in `cache`;
                                  // absent with block_tables
  ConstTensorView topk_length{};  // optional [b] or [b, s_q], i32: entries of each row of `indices`
                                  // that count
  // In place of `indices`, for attention over all rows of each sequence; both or none, and none of
  // the other arguments that choose rows with them.
  ConstTensorView block_tables{};  // [b, n], i32: the blocks of each sequence in `cache`
  // i32: [b], cached rows, including those of the step's own queries; or [b, s_q], the rows that
  // each query sees, whatever `causal` is.
  ConstTensorView context_lens{};
  // A second cache of the same format, attended in the same softmax, with slots of its own. Either
  // both of the first two are given or none of the three.
  ConstTensorView extra_cache{};        // [extra_blocks, extra_block_size, 1, row]
  ConstTensorView extra_indices{};      // [b, s_q, extra_topk], i32
  ConstTensorView extra_topk_length{};  // optional [b] or [b, s_q], i32
  ConstTensorView attn_sink{};          // optional [h_q], f32: a logit per head without a value
  // Of fp8_576, optional [1], f32, on the device of q: what all queries and all rows are multiplied
  // by; 1 where absent.
  ConstTensorView q_scale{}, kv_scale{};
  CacheFormat format = CacheFormat::fp8_656;
  std::optional<double> scale{};  // of the logits; 1 / sqrt(d_qk) if absent
  // Whether the result of a query is bitwise independent of the other queries of the call. Without
  // it a GPU may be faster.
  bool batch_invariant = true;
  // Whether every sum of a query is formed in one go, over its entries in their order and those of
  // the second cache behind them, as forward() does with the same argument: of the same rows in
  // bf16 both give the same bits. On sm90 that is what batch_invariant does, too.
  bool in_list_order = false;
  // Of context_lens [b]: whether each query sees the rows up to its own, or otherwise all of them.
  bool causal = true;
  // Whether the lse of a query with nothing visible is +inf, as in FlashMLA, instead of -inf.
  bool flash_mla_lse = false;
  TensorView out{};  // [b, s_q, h_q, 512], bf16
  TensorView lse{};  // optional [b, s_q, h_q], f32
  // Optional, u8 on the device of q, aligned to 256 bytes, at least decode_workspace_bytes():
  // scratch memory of GPU backends, in use until the work on the stream is done. Required if that
  // is not 0. The CPU backend does not use it.
  TensorView workspace{};
};

// Attention of every query over the cache rows that `indices` names, or all of its sequence:
//   x[i,s,h,j] = scale * dot(q[i,s,h,:], row(indices[i,s,j]))     over the visible entries j
//   lse = log sum_j exp(x)   (natural logarithm, without the sink)
//   out = sum_j exp(x - lse') * row(indices[i,s,j])[:512]
// where row(t) is slot t of the cache, dequantised (see CacheFormat and cache_scale()), and lse' is
// lse, or log(exp(lse) + exp(attn_sink[h])) with a sink. V is the first 512 columns of the row; in
// fp8_584 and in bf16 with 512 columns these are all, RoPE included. The entries of a second cache
// take part in the same sums. In fp8_576 logits are multiplied by q_scale * kv_scale, which are
// read when the call runs, and out by kv_scale.
//
// With block_tables the entries of a query are the positions t of its sequence, whose slots are
// block_tables[i, t / block_size] * block_size + t % block_size. With context_lens [b] query s sees
// the positions t < context_lens[i] - s_q + s + 1: the queries of a step are the last rows of its
// sequence. With causal = false, which only context_lens allows, it sees the positions
// t < context_lens[i]; with context_lens [b, s_q] the positions t < context_lens[i,s]. Lengths are
// clamped to [0, n * block_size]; the rows of a block outside of [0, blocks) are ignored, and
// entries of the table behind what any query sees are not read.
//
// A slot is block * block_size + offset. Entry j is visible if j is below the query's topk_length
// (clamped to [0, topk]; absent: topk) and its slot lies in the cache: 0 <= slot < blocks *
// block_size. Other entries are ignored and their rows are not read. Several entries with the same
// slot all count. A query without visible entries gets out = 0 and lse = -inf, or with
// flash_mla_lse +inf. A sink of -inf has no effect; a sink of +inf gives out = 0. NaN or infinity
// in a row affects only the queries that see the row. On the CPU a logit of -inf has weight 0, and
// a query whose logits are all -inf gets the results of one without visible entries. A logit of
// +inf gives lse = +inf, a logit of NaN gives NaN, and out is NaN then. A sink of NaN makes out NaN
// where any entry has weight.
//
// Sizes: any b, s_q, h_q, topk, blocks and block_size, including 0; fewer than 2^31 slots in a
// cache and n * block_size below 2^31. Sums are in f32. Strides: the innermost dimension is
// contiguous, but for lengths; the others are arbitrary (also 0 or negative; not 0 for outputs), as
// are all of lengths: [b, s_q] with stride 0 over s_q is one length for all queries. The cache of
// fp8_584 has rows 584 elements apart, as its nominal shape says, and where there are several
// blocks, these are at least block_size * 584 bytes rounded up to a multiple of 576 apart.
//
// Memory: all tensors belong to the caller and live on one device; an output that overlaps another
// tensor is refused. The CPU backend allocates scratch memory that grows with num_threads() and,
// by 4 bytes per entry, with topk or n * block_size. Repeated calls give bitwise equal results, on
// the CPU with any number of threads and whatever batch_invariant is. On GPUs topk, extra_topk, n *
// block_size and b * s_q are up to 2^23 and b * s_q * h_q up to 2^30; on sm90 rows have 576 columns
// with block_tables; fp8_576 is for sm90 with block_tables alone; rows of q, out and caches begin
// at multiples of 16 bytes, as do the blocks of fp8_584. The call allocates nothing and neither
// waits nor reads lengths on the host, so a CUDA graph may capture it and replay it with other
// contents. Streams: see Stream. Thread-safe. Returns the backend that ran. Errors: Error
// (invalid_argument) naming the argument, before anything is written; Error (unsupported) if no
// backend, or not the forced one, can run it.
//
// Defined by DeepSeek-V3.2 (DeepSeek Sparse Attention); the caches in f8 are those of FlashMLA.
WINNOW_EXPORT Backend decode(const DecodeArgs& args, const RunOptions& options = {});

// The bytes of `workspace` that decode() needs with the same arguments; 0 on the CPU. The result
// depends on shapes, the format, batch_invariant and the GPU, not on addresses or values, and is no
// smaller for more sequences, queries or entries: one workspace for the largest step serves all
// steps on its stream. Errors: as decode().
WINNOW_EXPORT std::int64_t decode_workspace_bytes(const DecodeArgs& args,
                                                  const RunOptions& options = {});

}  // namespace winnow::sparse_mla
