// Gradients of compressed rows.
#pragma once

#include <cstdint>
#include <optional>

#include "winnow/core/backend.h"
#include "winnow/core/export.h"
#include "winnow/core/tensor.h"

namespace winnow::compressor {

// Arguments of backward(). Those up to `hadamard` are as in forward(), which has c and R.
struct BackwardArgs {
  ConstTensorView kv{};
  ConstTensorView gate{};
  ConstTensorView position_bias{};
  ConstTensorView cu_seqlens{};
  ConstTensorView cu_rows{};
  bool overlap = false;
  ConstTensorView norm_weight{};
  std::optional<double> eps{};
  ConstTensorView cos{};
  ConstTensorView sin{};
  ConstTensorView first_position{};
  bool hadamard = false;
  // What forward() made of the same arguments; both absent if norm_weight is.
  ConstTensorView rows{};        // [rows, d], as kv or R
  ConstTensorView rstd{};        // [rows], R
  ConstTensorView d_rows{};      // [rows, d], as kv or R
  TensorView d_kv{};             // [tokens, c * d], as kv or R
  TensorView d_gate{};           // as kv or R
  TensorView d_position_bias{};  // [ratio, c * d], R
  TensorView d_norm_weight{};    // [d], R; absent if norm_weight is
  // Optional, u8 on the device of kv, aligned to 256 bytes, at least backward_workspace_bytes():
  // the scratch memory of a GPU, which else is allocated in the order of the stream.
  TensorView workspace{};
};

// With sum[w] a row of forward() before norm, rotation and transform, G[w] the gradient of it, and
// P the softmax:
//   d_kv[token j]   = P[j] * G[w]
//   d_gate[token j] = P[j] * G[w] * (kv[token j] - sum[w])
//   d_position_bias[j] = sum over all windows of d_gate[token j]
// In each column on its own, as in forward(). With norm_weight, and u[w] the gradient before the
// rotation and the transform:
//   G[w]          = rstd[w] * (u[w] * norm_weight - sum[w] * rstd[w] * mean(rows[w] * d_rows[w]))
//   d_norm_weight = sum over all windows of u[w] * sum[w] * rstd[w]
// sum[w] is computed anew. Every element is written:
// tokens of no window have gradients of 0, and with `overlap` so have the first d columns of the
// last complete window of a sequence. Everything is computed in R and rounded once.
//
// Repeated calls give bitwise equal results, for any number of threads, those of d_position_bias
// and d_norm_weight too. What no window of a GPU's lists covers is not written there.
// Shapes, strides, memory, streams and errors: as forward(); outputs that overlap inputs or each
// other are refused. Returns the backend that ran.
WINNOW_EXPORT Backend backward(const BackwardArgs& args, const RunOptions& options = {});

// The bytes of `workspace` that backward() needs with the same arguments; 0 on the CPU.
WINNOW_EXPORT std::int64_t backward_workspace_bytes(const BackwardArgs& args,
                                                    const RunOptions& options = {});

}  // namespace winnow::compressor
