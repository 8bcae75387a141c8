// Decode: values of rows in f8 as bf16.
//
// A pair of values costs four instructions: the bits of f8_e4m3, moved into those of bf16, are the
// value times 2^-120, subnormal numbers included, and one multiplication by scale * 2^120 rounds
// the result as the format says. Groups with scales that bf16 cannot hold, and those that hold a
// NaN, go a longer way to the same values.
#pragma once

#include <cstdint>

#include "winnow/device/common/arithmetic.cuh"

namespace winnow::sparse_mla::decode_values {

using device::multiply_bf16x2;
using device::pack_bf16;
using device::select_bytes;

inline constexpr float kFormatFactor = 0x1p120f;  // from the bits of f8_e4m3 in those of bf16

// Whether bf16 holds scale * 2^120.
__device__ __forceinline__ bool is_short(float scale) {
  const std::uint32_t bits = __float_as_uint(scale);
  constexpr std::uint32_t k256 = 0x43800000u;
  return (bits & 0xffffu) == 0 && (bits & 0x7fffffffu) < k256;
}

// Bit 31, 23, 15 or 7 of the result is set if some byte of the words is NaN, as an f8_e4m3. Where
// none is, no byte carries into the next. The words are looked at side by side: one behind the
// other, the sixteen of a group take as long as their conversion.
__device__ __forceinline__ std::uint32_t find_nan(const uint4& words) {
  const auto bits = [](std::uint32_t word) { return (word + 0x01010101u) ^ word; };
  return bits(words.x) | bits(words.y) | (bits(words.z) | bits(words.w));
}
inline constexpr std::uint32_t kNanBits = 0x80808080u;

// The bits of two f8_e4m3 in those of bf16: times 2^-120. kPair: bytes 0 and 1 of the word, or 2
// and 3. Each byte is widened with its sign, so that the sign stands in the highest bit after the
// shift too.
template <int kPair>
__device__ __forceinline__ std::uint32_t widen_f8(std::uint32_t word) {
  constexpr std::uint32_t kSelector = kPair == 0 ? 0x9180u : 0xb3a2u;
  return select_bytes<kSelector>(word) << 4 & 0x87f087f0u;
}

// The values of a word times a factor that bf16 holds, four of them.
__device__ __forceinline__ uint2 dequantise(std::uint32_t word, std::uint32_t factor) {
  return make_uint2(multiply_bf16x2(widen_f8<0>(word), factor),
                    multiply_bf16x2(widen_f8<1>(word), factor));
}

// The same with any scale and any values.
__device__ __forceinline__ uint2 dequantise_any(std::uint32_t word, float scale) {
  const std::uint32_t nan = (word & 0x7f7f7f7fu) + 0x01010101u;
  const auto value = [&](std::uint32_t pair, int half, int byte) {
    const float unscaled =
        __uint_as_float(half == 0 ? pair << 16 : pair & 0xffff0000u) * kFormatFactor;
    return nan >> (8 * byte + 7) & 1 ? __uint_as_float(0x7fffffffu) : unscaled * scale;
  };
  const std::uint32_t low = widen_f8<0>(word), high = widen_f8<1>(word);
  return make_uint2(pack_bf16(value(low, 0, 0), value(low, 1, 1)),
                    pack_bf16(value(high, 0, 2), value(high, 1, 3)));
}

// The factor for dequantise(), twice, of a scale for which is_short() holds.
__device__ __forceinline__ std::uint32_t factor_of(float scale) {
  return select_bytes<0x3232u>(__float_as_uint(scale * kFormatFactor));
}

}  // namespace winnow::sparse_mla::decode_values
