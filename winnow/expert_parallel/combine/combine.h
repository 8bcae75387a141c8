// The arguments of AllToAll::combine().
#pragma once

#include "winnow/core/error.h"
#include "winnow/core/stream.h"
#include "winnow/core/tensor.h"

namespace winnow::expert_parallel {

// Arguments of combine().
struct CombineArgs {
  ConstTensorView expert_output{};  // [R, H], the layer's dtype; with pair_values it may be absent
  ConstTensorView bias{};           // optional [n, H], the layer's dtype
  ConstTensorView second_bias{};    // optional beside bias: [n, H], the layer's dtype
  bool weighted = false;            // multiply each row by the weight sent at dispatch
  ConstTensorView weights{};  // optional [n, K], weight_dtype: multiply each row by these instead
  // Optional: a value of each pair of the rows, expert-major [R], token-major [R, K], weight_dtype.
  // They are returned bit for bit to pair_values_out [n, K], weight_dtype.
  ConstTensorView pair_values{};
  TensorView pair_values_out{};
  // Token-major: instead, values [t, k] of all rows of token t are added, in f32, as rows are.
  bool add_values = false;
  TensorView out{};  // optional [n, H], the layer's dtype: receives the sums
  int sm_count = 0;  // of this call, at most the layer's; 0: the layer's
  Stream stream{};   // of the layer's GPU
  // As in DispatchArgs. The descriptor is ignored as well; a default-constructed one will do.
  const Error* refusal = nullptr;
};

}  // namespace winnow::expert_parallel
