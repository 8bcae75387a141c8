// Element types of tensors, and the host types that stand for the narrow ones.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace winnow {

// The order is that of kDTypeNames and kCodes in winnow/python, too, where bool comes last.
enum class DType : std::uint8_t { f32, f16, bf16, f8_e4m3, u8, i32, i64, f64 };

// Bytes of one element.
constexpr std::int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::f16:
    case DType::bf16:
      return 2;
    case DType::f8_e4m3:
    case DType::u8:
      return 1;
    case DType::i64:
    case DType::f64:
      return 8;
  }
  return 0;
}

constexpr std::string_view to_string(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "f32";
    case DType::f16:
      return "f16";
    case DType::bf16:
      return "bf16";
    case DType::f8_e4m3:
      return "f8_e4m3";
    case DType::u8:
      return "u8";
    case DType::i32:
      return "i32";
    case DType::i64:
      return "i64";
    case DType::f64:
      return "f64";
  }
  return "unknown";
}

// The dtype in which elements of `dtype` are summed: f64 for f64, else f32. Tensors that hold such
// sums, like lse, or are added to them, like attn_sink, have it too.
constexpr DType accumulator_of(DType dtype) {
  return dtype == DType::f64 ? DType::f64 : DType::f32;
}

// `value` rounded to accumulator_of(dtype).
constexpr double round_to_accumulator(DType dtype, double value) {
  return dtype == DType::f64 ? value : static_cast<double>(static_cast<float>(value));
}

namespace detail {

// Every conversion below is free of branches on the data, so that loops over it become SIMD.

constexpr float f16_to_f32(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t magnitude = bits & 0x7fffu;
  // The shift moves exponent and mantissa to their places in an f32; the factor 2^112 corrects the
  // exponent bias and makes subnormals normal. Inf and NaN have the exponent 31 and get the f32
  // exponent 255.
  const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  const std::uint32_t special = magnitude >= 0x7c00u ? 0x7f800000u : 0u;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(scaled) | special | sign);
}

constexpr std::uint16_t f32_to_f16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  // Normal results: rebias, then round to nearest even on the 13 bits that go.
  const std::uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Subnormal results: their step is 2^-24, which is the last bit of an f32 near 0.5. So adding 0.5
  // leaves the rounded f16 mantissa in the lowest bits of the sum.
  const std::uint32_t subnormal =
      std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  std::uint32_t result = magnitude < 0x38800000u ? subnormal : normal;
  // 65536 and above; values from 65520 on have become infinity by rounding.
  result = magnitude >= 0x47800000u ? 0x7c00u : result;
  result = magnitude > 0x7f800000u ? 0x7e00u : result;  // NaN
  return static_cast<std::uint16_t>(result | sign);
}

constexpr float bf16_to_f32(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

constexpr std::uint16_t f32_to_bf16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const std::uint32_t nan = (bits >> 16) | 0x40u;
  return static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

constexpr float f8_e4m3_to_f32(std::uint8_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x80u) << 24;
  const std::uint32_t magnitude = bits & 0x7fu;
  const float scaled = std::bit_cast<float>(magnitude << 20) * 0x1p120f;
  const std::uint32_t special = magnitude == 0x7fu ? 0x7fc00000u : 0u;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(scaled) | special | sign);
}

constexpr std::uint8_t f32_to_f8_e4m3(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 24) & 0x80u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const std::uint32_t normal =
      (magnitude - 0x3c000000u + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
  // The step of subnormals is 2^-9, which is the last bit of an f32 near 2^14.
  const std::uint32_t subnormal =
      std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0x1p14f) - 0x46800000u;
  std::uint32_t result = magnitude < 0x3c800000u ? subnormal : normal;
  result = magnitude >= 0x43e00000u ? 0x7eu : result;  // 448 and above saturate
  result = magnitude > 0x7f800000u ? 0x7fu : result;   // NaN
  return static_cast<std::uint8_t>(result | sign);
}

}  // namespace detail

// IEEE binary16. Conversion from float rounds to nearest even; overflow gives infinity.
struct Half {
  std::uint16_t bits = 0;
  Half() = default;
  constexpr explicit Half(float value) : bits(detail::f32_to_f16(value)) {}
  constexpr explicit operator float() const { return detail::f16_to_f32(bits); }
};

// The upper half of a float. Conversion from float rounds to nearest even.
struct BFloat16 {
  std::uint16_t bits = 0;
  BFloat16() = default;
  constexpr explicit BFloat16(float value) : bits(detail::f32_to_bf16(value)) {}
  constexpr explicit operator float() const { return detail::bf16_to_f32(bits); }
};

// FP8 E4M3 of the OCP specification ("fn"): no infinity, largest value 448, one NaN per sign.
// Conversion from float rounds to nearest even and saturates; NaN stays NaN.
struct Float8E4M3 {
  std::uint8_t bits = 0;
  Float8E4M3() = default;
  constexpr explicit Float8E4M3(float value) : bits(detail::f32_to_f8_e4m3(value)) {}
  constexpr explicit operator float() const { return detail::f8_e4m3_to_f32(bits); }
};

// The DType of a host type: dtype_of<float> is DType::f32.
template <class T>
inline constexpr DType dtype_of = [] {
  static_assert(sizeof(T) == 0, "no DType stands for this host type");
  return DType::u8;
}();
template <>
inline constexpr DType dtype_of<float> = DType::f32;
template <>
inline constexpr DType dtype_of<Half> = DType::f16;
template <>
inline constexpr DType dtype_of<BFloat16> = DType::bf16;
template <>
inline constexpr DType dtype_of<Float8E4M3> = DType::f8_e4m3;
template <>
inline constexpr DType dtype_of<std::uint8_t> = DType::u8;
template <>
inline constexpr DType dtype_of<std::int32_t> = DType::i32;
template <>
inline constexpr DType dtype_of<std::int64_t> = DType::i64;
template <>
inline constexpr DType dtype_of<double> = DType::f64;

}  // namespace winnow
