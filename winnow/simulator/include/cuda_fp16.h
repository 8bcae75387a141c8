// Stands for CUDA's header in builds for the simulator.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

#include "winnow/core/dtype.h"

struct __half {
  std::uint16_t bits;
};
struct alignas(4) __half2 {
  __half x, y;
};
inline float __half2float(__half x) { return winnow::detail::f16_to_f32(x.bits); }
inline float2 __half22float2(__half2 two) { return {__half2float(two.x), __half2float(two.y)}; }
inline __half __float2half_rn(float x) { return {winnow::detail::f32_to_f16(x)}; }
inline std::uint16_t __half_as_ushort(__half x) { return x.bits; }
inline __half __ushort_as_half(std::uint16_t bits) { return {bits}; }
inline __half2 __floats2half2_rn(float x, float y) {
  return {__float2half_rn(x), __float2half_rn(y)};
}
