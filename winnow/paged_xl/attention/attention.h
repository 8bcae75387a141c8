// One decode step of relative-position attention over a paged cache.
#pragma once

#include <cstdint>
#include <optional>

#include "winnow/core/backend.h"
#include "winnow/core/export.h"
#include "winnow/core/tensor.h"

namespace winnow::paged_xl {

// Arguments of attention(). A default-constructed optional tensor is absent.
struct AttentionArgs {
  ConstTensorView query{};        // [num_seqs, num_heads, head_size], f32, f16, bf16 or f64
  ConstTensorView key_cache{};    // [num_blocks, num_kv_heads, head_size/x, block_size, x], as
                                  // query; x = 16 / size of an element
  ConstTensorView value_cache{};  // [num_blocks, num_kv_heads, head_size, block_size], as query
  ConstTensorView pos_bias_u{};   // [num_heads, head_size] or [num_seqs, num_heads, head_size], as
                                  // query: content bias
  // The position term: either matrix_bd, or pos_bias_v with r.
  ConstTensorView matrix_bd{};     // [num_seqs, num_heads, columns], as query or f32, unscaled
  ConstTensorView pos_bias_v{};    // shapes of pos_bias_u, as query: position bias
  ConstTensorView r{};             // [num_heads, max_distance, head_size], as query: projected
                                   // embedding of each distance
  ConstTensorView block_tables{};  // [num_seqs, max_blocks_per_seq], i32
  ConstTensorView context_lens{};  // [num_seqs], i32: cached tokens, the step's own included
  std::optional<double> scale{};   // of the logits; 1 / sqrt(head_size) if absent
  TensorView out{};                // [num_seqs, num_heads, head_size], as query
  TensorView lse{};                // optional [num_seqs, num_heads], f32
  // Optional, u8 on the device of query, aligned to 256 bytes, at least
  // attention_workspace_bytes(): scratch memory of GPU backends, in use until the work on the
  // stream is done. The CPU backend does not use it.
  TensorView workspace{};
};

// The new token of each sequence s attends to its cached tokens j < context_lens[s]:
//   logit[s,h,j] = scale * (dot(query[s,h] + pos_bias_u[h], key[j]) + bd[s,h,j])
//   lse = log sum_j exp(logit)   (natural logarithm)
//   out = sum_j exp(logit - lse) * value[j]
// Token j lies in block block_tables[s, j / block_size] at offset j % block_size; head h reads the
// cached head h / (num_heads / num_kv_heads). The position term is
//   bd[s,h,j] = matrix_bd[s,h,j]                                          plain mode
//   bd[s,h,j] = dot(query[s,h] + pos_bias_v[h], r[h, distance])           fused mode
// with distance = context_lens[s] - 1 - j: the step's own key has been appended and has distance 0.
// Fused mode equals position_term() followed by plain mode, but does not write the term to memory.
// A bias with a sequence dimension is used per sequence. Sums, softmax and the addition of query
// and biases are in f32; with f64, which is for the CPU, they are in f64, and so are matrix_bd and
// lse. A context of 0 tokens, or one whose logits are all -inf, gives out = 0 and
// lse = -inf. On the CPU a logit of +inf gives lse = +inf and out = NaN, and a logit
// of NaN gives NaN for both.
//
// Sizes: head_size 32, 64, 80, 96, 112, 128, 160, 192 or 256; block_size 8, 16, 32, 64 or 128;
// num_kv_heads divides num_heads; any num_seqs, num_blocks and table length, including 0. matrix_bd
// may have more columns than the longest context. Sequences may share blocks. The call does not
// read blocks and slots past a sequence's context, entries of block_tables past the last block that
// a sequence needs, or columns of matrix_bd past the context. Strides: the innermost dimension is
// contiguous, as are the last three of key_cache and the last two of value_cache; the others are
// arbitrary (also 0 or negative; not 0 for outputs).
//
// Memory: all tensors belong to the caller and live on one device; an output that
// overlaps another tensor is refused.
// CPU scratch memory is num_heads * (head_size + 2) floats, or doubles with f64, per 512 tokens of
// context. On a GPU the scratch memory is `workspace` or, if that is absent, memory from the
// stream's pool (cudaMallocAsync), which a captured graph keeps as nodes of its own: up to 64 MiB
// (more only for more than 2^16 pairs of sequence and head). Repeated calls give bitwise equal
// results; on the CPU they do not depend on the number of threads, the rest of the batch or the
// position of the blocks either. Streams: see Stream. The call neither waits for the GPU nor reads
// lengths on the host, so a CUDA graph may capture it and replay it with other contents.
// Thread-safe. Returns the backend that ran. Errors: Error (invalid_argument) naming the argument,
// before anything is written; on the CPU, and on a GPU in checking mode (RunOptions::check), also
// for a length that is negative or beyond what block_tables, matrix_bd or r hold and for a block
// outside [0, num_blocks) that a sequence needs, with sequence, position and value. Without
// checking mode a GPU clamps such a length to what they hold and treats the tokens of such a block
// as masked. Error (unsupported) if no backend, or not the forced one, can run it.
//
// Relative attention: Dai et al. 2019, "Transformer-XL". Paged cache and its layout: Kwon et al.
// 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention" (vLLM).
WINNOW_EXPORT Backend attention(const AttentionArgs& args, const RunOptions& options = {});

// The bytes of `workspace` that attention() needs with the same arguments; 0 on the CPU. The result
// depends on shapes, dtypes, the mode and the GPU, not on addresses or values, and is no smaller
// for more sequences or for more room in block_tables, matrix_bd and r: one workspace for the
// largest step serves all steps on its stream. Errors: as attention().
WINNOW_EXPORT std::int64_t attention_workspace_bytes(const AttentionArgs& args,
                                                     const RunOptions& options = {});

}  // namespace winnow::paged_xl
