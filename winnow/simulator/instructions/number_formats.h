// The number formats of the tensor cores and the roundings of single instructions, in the terms of
// the PTX document (cvt, ex2, max). What agrees with the library's own types comes from
// core/dtype.h.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "winnow/core/dtype.h"

namespace winnow::simulator {

// The NaN that tensor cores and most f32 instructions give.
inline constexpr std::uint32_t kCanonicalNan = 0x7fffffffu;

// f8_e5m2: the upper half of an f16.
constexpr float f8_e5m2_to_f32(std::uint8_t bits) {
  return winnow::detail::f16_to_f32(static_cast<std::uint16_t>(bits << 8));
}

// Tensor cores read the upper 19 bits of a tf32 and take the others as zeros.
constexpr float tf32_to_f32(std::uint32_t bits) { return std::bit_cast<float>(bits & 0xffffe000u); }

// cvt.rn.bf16.f32: to nearest even; every NaN becomes 0x7fff.
constexpr std::uint16_t cvt_rn_bf16(float x) {
  if (x != x) return 0x7fff;
  return winnow::detail::f32_to_bf16(x);
}

// cvt.rn.bf16x2.f32 d, high, low: `low` in the lower half.
constexpr std::uint32_t cvt_rn_bf16x2(float high, float low) {
  return std::uint32_t{cvt_rn_bf16(high)} << 16 | cvt_rn_bf16(low);
}

// cvt.rn.f16.f32: to nearest even, infinity beyond 65504; every NaN becomes 0x7fff.
constexpr std::uint16_t cvt_rn_f16(float x) {
  if (x != x) return 0x7fff;
  return winnow::detail::f32_to_f16(x);
}

// cvt.rn.satfinite.e4m3x2.f32, one half of it: to nearest even, +-448 beyond that and for
// infinities; every NaN becomes 0x7f.
constexpr std::uint8_t cvt_rn_satfinite_e4m3(float x) {
  if (x != x) return 0x7f;
  return winnow::detail::f32_to_f8_e4m3(x);
}

// mul.rn.bf16x2: f32 holds the product of two bf16 exactly, unless it overflows or underflows.
constexpr std::uint32_t mul_rn_bf16x2(std::uint32_t a, std::uint32_t b) {
  const auto product = [](std::uint32_t x, std::uint32_t y) {
    return cvt_rn_bf16(std::bit_cast<float>(x << 16) * std::bit_cast<float>(y << 16));
  };
  return std::uint32_t{product(a >> 16, b >> 16)} << 16 | product(a & 0xffffu, b & 0xffffu);
}

// prmt.b32: digit i of the selector gives byte i of the result. Its bits 0 to 2 name a byte of b:a;
// where its bit 3 is set, the result is the sign bit of that byte, eight times.
constexpr std::uint32_t prmt_b32(std::uint32_t a, std::uint32_t b, std::uint32_t selector) {
  const std::uint64_t bytes = std::uint64_t{b} << 32 | a;
  std::uint32_t selected = 0;
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t digit = selector >> (4 * i) & 0xfu;
    const auto byte = static_cast<std::uint32_t>(bytes >> (8 * (digit & 7u)) & 0xffu);
    selected |= ((digit & 8u) == 0 ? byte : byte >= 0x80u ? 0xffu : 0u) << (8 * i);
  }
  return selected;
}

// .ftz: subnormal numbers become zeros of their sign.
inline float flush_to_zero(float x) {
  return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x;
}

// ex2.approx.ftz.f32. The document bounds the relative error (about 2^-22) and gives no bits; here
// the result is that of the C library, within 2^-23: 1 for subnormal x, +0 for -inf and where the
// result would be subnormal, +inf for +inf.
inline float ex2_approx_ftz(float x) {
  if (x != x) return std::bit_cast<float>(kCanonicalNan);
  return flush_to_zero(std::exp2(flush_to_zero(x)));
}

// max.NaN.f32: NaN if either is; -0 is less than +0.
inline float max_nan(float a, float b) {
  if (a != a || b != b) return std::bit_cast<float>(kCanonicalNan);
  if (a == b) return std::signbit(a) ? b : a;
  return a > b ? a : b;
}

}  // namespace winnow::simulator
