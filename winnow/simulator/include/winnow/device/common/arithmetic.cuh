// Host half of winnow/device/common/arithmetic.cuh.
#pragma once

#include <bit>
#include <cstdint>

#include <cuda_runtime.h>

#include "winnow/core/dtype.h"
#include "winnow/simulator/instructions/number_formats.h"

namespace winnow::device {

inline float ex2(float x) { return simulator::ex2_approx_ftz(x); }
inline float relu(float x) { return simulator::max_nan(x, 0.0f); }
inline std::uint32_t pack_bf16(float low, float high) {
  return simulator::cvt_rn_bf16x2(high, low);
}
inline std::uint32_t pack_f16(float low, float high) {
  return std::uint32_t{winnow::detail::f32_to_f16(high)} << 16 | winnow::detail::f32_to_f16(low);
}
inline float2 unpack_f16(std::uint32_t packed) {
  return {winnow::detail::f16_to_f32(static_cast<std::uint16_t>(packed)),
          winnow::detail::f16_to_f32(static_cast<std::uint16_t>(packed >> 16))};
}
inline std::uint32_t multiply_f16x2(std::uint32_t a, std::uint32_t b) {
  const float2 x = unpack_f16(a), y = unpack_f16(b);
  return pack_f16(x.x * y.x, x.y * y.y);
}
inline std::uint32_t pack_f8(const float (&x)[4]) {
  std::uint32_t packed = 0;
  for (int i = 0; i < 4; ++i) {
    packed |= std::uint32_t{simulator::cvt_rn_satfinite_e4m3(x[i])} << 8 * i;
  }
  return packed;
}
inline void unpack_f8(std::uint32_t packed, float (&x)[4]) {
  for (int i = 0; i < 4; ++i) {
    x[i] = winnow::detail::f8_e4m3_to_f32(static_cast<std::uint8_t>(packed >> 8 * i));
  }
}

template <std::uint32_t kSelector>
std::uint32_t select_bytes(std::uint32_t word) {
  return simulator::prmt_b32(word, 0, kSelector);
}
template <std::uint32_t kSelector>
std::uint32_t select_bytes(std::uint32_t low, std::uint32_t high) {
  return simulator::prmt_b32(low, high, kSelector);
}
inline std::uint32_t any_sign(std::uint32_t any_before, float a, float b) {
  return any_before | std::bit_cast<std::uint32_t>(a) | std::bit_cast<std::uint32_t>(b);
}
inline std::uint32_t any_sign(float a, float b, float c) {
  return any_sign(std::bit_cast<std::uint32_t>(a), b, c);
}
inline std::uint32_t multiply_bf16x2(std::uint32_t a, std::uint32_t b) {
  return simulator::mul_rn_bf16x2(a, b);
}

}  // namespace winnow::device
