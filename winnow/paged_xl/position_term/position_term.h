// The position term of one decode step of relative-position attention.
#pragma once

#include "winnow/core/backend.h"
#include "winnow/core/export.h"
#include "winnow/core/tensor.h"

namespace winnow::paged_xl {

// Arguments of position_term().
struct PositionTermArgs {
  ConstTensorView query{};         // [num_seqs, num_heads, head_size], f32, f16, bf16 or f64
  ConstTensorView pos_bias_v{};    // [num_heads, head_size] or [num_seqs, num_heads, head_size],
                                   // dtype of query: position bias
  ConstTensorView r{};             // [num_heads, max_distance, head_size], dtype of query:
                                   // projected embedding of each distance
  ConstTensorView context_lens{};  // [num_seqs], i32: cached tokens, the step's own included
  TensorView matrix_bd{};          // [num_seqs, num_heads, columns], dtype of query or f32
};

// Computes the argument matrix_bd of attention(). For every token j < context_lens[s]:
//   matrix_bd[s,h,j] = dot(query[s,h] + pos_bias_v[h] (or [s,h]), r[h, distance])
// with distance = context_lens[s] - 1 - j: the step's own key has been appended already and has
// distance 0. The term is not scaled. Columns j >= context_lens[s] are not written. The sums, and
// query + pos_bias_v, are in f32; an f16 or bf16 matrix_bd is rounded to nearest even. With f64 (on
// the CPU alone) everything is f64, matrix_bd too.
//
// Sizes: head_size 32, 64, 80, 96, 112, 128, 160, 192 or 256; any num_seqs and num_heads, also 0
// (on a GPU up to 2^20 and 65535); any columns and max_distance, also 0, if no context is longer
// than either. Strides: the innermost dimension is contiguous, the others are
// arbitrary (also 0 or negative; not 0 for matrix_bd). Memory: all tensors belong to the caller and
// live on one device; a matrix_bd that overlaps an input is refused. Results are bitwise equal in
// every repetition and for every number of threads. Streams: see Stream. Thread-safe. Returns the
// backend that ran. Errors: Error (invalid_argument) naming the argument, before anything is
// written. On the CPU, and on a GPU in checking mode (RunOptions::check), a length below 0 or above
// columns or max_distance is such an error, which names sequence and value; without checking mode a
// GPU clamps the length. Error (unsupported) if no backend, or not the forced one, can run it.
//
// Defined by Dai et al. 2019, "Transformer-XL" (terms b and d of its relative attention).
WINNOW_EXPORT Backend position_term(const PositionTermArgs& args, const RunOptions& options = {});

}  // namespace winnow::paged_xl
