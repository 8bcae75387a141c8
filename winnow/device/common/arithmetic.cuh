// Instructions of arithmetic that the language has no name for. Device code only.
#pragma once

#include <cstdint>

namespace winnow::device {

// 2^x, relative error about 2^-22; 2^-inf is 0 and results below 2^-126 are flushed to 0.
__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The larger of x and 0; NaN if x is.
__device__ __forceinline__ float relu(float x) {
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

// Two f32 rounded to nearest even, packed as bf16x2: `low` in the lower half.
__device__ __forceinline__ std::uint32_t pack_bf16(float low, float high) {
  std::uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

}  // namespace winnow::device
