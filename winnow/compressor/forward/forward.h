// Compressed rows: one row for every few tokens, the sum of the tokens weighed by a softmax.
#pragma once

#include <cstdint>
#include <optional>

#include "winnow/core/backend.h"
#include "winnow/core/export.h"
#include "winnow/core/tensor.h"

namespace winnow::compressor {

// Arguments of forward(). A default-constructed optional tensor is absent. c is 2 with `overlap`,
// else 1; R is f64 for f64, else f32.
struct ForwardArgs {
  ConstTensorView kv{};              // [tokens, c * d], f32, f16, bf16 or f64
  ConstTensorView gate{};            // as kv
  ConstTensorView position_bias{};   // [ratio, c * d], R; ratio is 1 to 128
  ConstTensorView cu_seqlens{};      // [n + 1], i32: where each packed sequence begins; then tokens
  ConstTensorView cu_rows{};         // [n + 1], i32: where its rows begin; then their number
  bool overlap = false;              // windows are twice as wide as their distance
  ConstTensorView norm_weight{};     // optional [d], R: rows are normalised
  std::optional<double> eps{};       // of the norm; 1e-6 if absent
  ConstTensorView cos{};             // optional [positions, pairs], R: the last 2 * pairs
  ConstTensorView sin{};             // columns of the rows are rotated; both or neither
  ConstTensorView first_position{};  // optional [n], i32: of each sequence's first token; else 0
  bool hadamard = false;             // rows are transformed; d is a power of two
  TensorView rows{};                 // [rows, d], as kv or R
  TensorView rstd{};                 // optional [rows], R, with norm_weight: for backward()
};

// A sequence of S tokens has floor(S / ratio) rows; the tokens behind them have none. Window w has
// the tokens w * ratio to w * ratio + ratio - 1 of its sequence. In each column on its own:
//   g[j]   = gate[token j] + position_bias[j]
//   row[w] = sum over j of softmax(g)[j] * kv[token j]
// With `overlap` columns [0, d) of kv, gate and position_bias are for the next window, and columns
// [d, 2 * d) for the own one: the softmax of window w is over the first columns of window w - 1 and
// the last columns of window w, and in window 0 over the latter alone. Then, where asked for, and
// in this order:
//   row = row * rstd * norm_weight                    rstd = 1 / sqrt(mean(row^2) + eps)
//   (a, b) = (a * cos - b * sin, a * sin + b * cos)   of each pair of neighbours (a, b) in the last
//            2 * pairs columns, by the row of cos and sin for the position of the window's first
//            token
//   row = row H / sqrt(d)                             H: Sylvester's Hadamard matrix of +1 and -1
// Everything is computed in R and rounded once.
//
// d is a multiple of 8 up to 512. Tokens of no window are not read. A weight of 0 times a number
// that is not finite is NaN, and so is a column whose gates are all -inf or one of them +inf.
//
// Sizes: any tokens and n, including 0. Strides: the innermost dimension is contiguous, the others
// are arbitrary (also 0 or negative; not 0 for outputs). Memory: all tensors belong to the caller
// and live on one device; outputs that overlap inputs or each other are refused. Repeated calls
// give bitwise equal results, for any number of threads. Streams: see Stream. Thread-safe. Returns
// the backend that ran. Errors: Error (invalid_argument) naming the argument, before anything is
// written, also where cu_seqlens, cu_rows or the positions do not fit; Error (unsupported) if no
// backend, or not the forced one, can run it.
//
// On a GPU (f32, f16 and bf16) the numbers in these lists are not checked but in checking mode.
// They lead to no place out of bounds: a row that is of no window is 0, and so is its rstd, and the
// last row of cos and sin stands for those that are missing.
//
// Defined by DeepSeek-V4: ratio 4 with overlap for its compressed sparse attention and its
// indexer's keys, ratio 128 for its heavily compressed attention.
WINNOW_EXPORT Backend forward(const ForwardArgs& args, const RunOptions& options = {});

}  // namespace winnow::compressor
