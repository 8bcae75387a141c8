// The arguments of AllToAll::combine().
#pragma once

#include "winnow/core/error.h"
#include "winnow/core/stream.h"
#include "winnow/core/tensor.h"

namespace winnow::expert_parallel {

// Arguments of combine().
struct CombineArgs {
  ConstTensorView expert_output{};  // [R, H], the layer's dtype
  ConstTensorView bias{};           // optional [n, H], the layer's dtype
  bool weighted = false;            // multiply each row by the weight sent at dispatch
  TensorView out{};                 // optional [n, H], the layer's dtype: receives the sums
  Stream stream{};                  // of the layer's GPU
  // As in DispatchArgs. The descriptor is ignored as well; a default-constructed one will do.
  const Error* refusal = nullptr;
};

}  // namespace winnow::expert_parallel
