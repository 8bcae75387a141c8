// The lse of a head, as the kernels of forward and decode store it. Device code only.
#pragma once

#include "winnow/device/common/math.cuh"

namespace winnow::sparse_mla {

// ln(2^reference * sum), or `of_nothing` where that is -inf: log2(0) is.
__device__ __forceinline__ float lse_of(float reference, float sum, float of_nothing) {
  const float lse = (reference + log2f(sum)) * device::kLn2;
  return lse == device::negative_infinity() ? of_nothing : lse;
}

}  // namespace winnow::sparse_mla
