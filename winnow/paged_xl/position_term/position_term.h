// The position term of one decode step of relative-position attention.
#pragma once

#include "winnow/core/backend.h"
#include "winnow/core/export.h"
#include "winnow/core/tensor.h"

namespace winnow::paged_xl {

// Arguments of position_term().
struct PositionTermArgs {
  ConstTensorView query{};         // [num_seqs, num_heads, head_size], f32, f16, bf16 or f64
  ConstTensorView pos_bias_v{};    // [num_heads, head_size] or [num_seqs, num_heads, head_size], as
                                   // query: position bias
  ConstTensorView r{};             // [num_heads, max_distance, head_size], as query: projected
                                   // embedding of each distance
  ConstTensorView context_lens{};  // [num_seqs], i32: cached tokens, the step's own included
  TensorView matrix_bd{};          // [num_seqs, num_heads, columns], as query or f32
};

// Computes the argument matrix_bd of attention(). For every token j < context_lens[s]:
//   matrix_bd[s,h,j] = dot(query[s,h] + pos_bias_v[h], r[h, distance])
// with distance = context_lens[s] - 1 - j: the step's own key has been appended already and has
// distance 0. The term is not scaled. Columns j >= context_lens[s] are not written. The sums are in
// f32, as is query + pos_bias_v; an f16 or bf16 matrix_bd is rounded to nearest even. With
// f64, which is for the CPU, they are in f64, as matrix_bd is.
//
// Sizes: head_size 32, 64, 80, 96, 112, 128, 160, 192 or 256; any num_seqs, num_heads, columns and
// max_distance, including 0, as long as every context fits the last two. Strides: the innermost
// dimension is contiguous, the others are arbitrary (also 0 or negative; not 0 for matrix_bd).
// Memory: all tensors belong to the caller and live on one device; a matrix_bd that
// overlaps an input is refused.
// Results are bitwise equal in every repetition and for every number of threads. Streams: see
// Stream. Thread-safe. Returns the backend that ran. Errors: Error (invalid_argument) naming the
// argument, before anything is written; on the CPU, and on a GPU in checking mode
// (RunOptions::check), also for a length that is negative or beyond what matrix_bd or r hold, with
// sequence and value; without it a GPU clamps the length. Error (unsupported) if no backend, or not
// the forced one, can run it.
//
// Defined by Dai et al. 2019, "Transformer-XL" (terms b and d of its relative attention).
WINNOW_EXPORT Backend position_term(const PositionTermArgs& args, const RunOptions& options = {});

}  // namespace winnow::paged_xl
