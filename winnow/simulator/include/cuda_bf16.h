// Stands for CUDA's header in builds for the simulator.
#pragma once

#include <cstdint>

#include "winnow/simulator/instructions/number_formats.h"

struct __nv_bfloat16 {
  std::uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 x) { return winnow::detail::bf16_to_f32(x.bits); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return {winnow::simulator::cvt_rn_bf16(x)}; }
inline std::uint16_t __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
