// The arguments of AllToAll::combine().
#pragma once

#include <cstdint>

#include "winnow/core/error.h"
#include "winnow/core/stream.h"
#include "winnow/core/tensor.h"

namespace winnow::expert_parallel {

// Arguments of combine(); DispatchArgs and Dispatched explain the sizes.
struct CombineArgs {
  ConstTensorView expert_output{};  // [R, H], the layer's dtype; optional with pair_values
  ConstTensorView bias{};           // optional [n, H], the layer's dtype: is added to the sums
  ConstTensorView second_bias{};    // optional, only with bias: the same
  bool weighted = false;            // expert-major: multiplies each row by its weight of dispatch()
  // Optional [n, K], weight_dtype, expert-major and not with `weighted`: the weights of the rows.
  ConstTensorView weights{};
  // Optional, weight_dtype: one value for each pair, [R] expert-major, [R, K] token-major. Each is
  // returned unchanged to its place in pair_values_out, [n, K], weight_dtype.
  ConstTensorView pair_values{};
  TensorView pair_values_out{};
  // Token-major: pair_values_out[t, k] is the f32 sum of values k of all rows of token t instead.
  bool add_values = false;
  // Columns of the table of which pair_values are one of several parts: all ranks must say the same
  // number, and so make as many calls.
  std::int64_t pair_columns = 0;
  TensorView out{};  // optional [n, H], the layer's dtype: receives the sums
  int sm_count = 0;  // multiprocessors of this call, at most the layer's; 0: as many as the layer's
  Stream stream{};   // on the layer's GPU
  // As in DispatchArgs. The descriptor is ignored too and may be default-constructed.
  const Error* refusal = nullptr;
};

}  // namespace winnow::expert_parallel
