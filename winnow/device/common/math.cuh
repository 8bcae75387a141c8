// Arithmetic in the forms that the kernels need. Device code only.
#pragma once

#include <cstdint>

#include "winnow/device/common/arithmetic.cuh"

namespace winnow::device {

inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

// Infinities, written as bit patterns so that no host header is needed.
__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }
__device__ __forceinline__ float negative_infinity() { return __uint_as_float(0xff800000u); }

// The four f8_e4m3 of a word as f16, the two lower ones in x, the lowest in its lower half. Exact;
// NaN stays NaN.
__device__ __forceinline__ uint2 widen_f8(std::uint32_t packed) {
#if __CUDA_ARCH__ >= 890
  uint2 wide;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n"
      "}"
      : "=r"(wide.x), "=r"(wide.y)
      : "r"(packed));
  return wide;
#else
  // Each in the upper byte of a half: shifted right by one, exponent and mantissa are those of an
  // f16 of 2^-8 times the value, subnormal ones too.
  const std::uint32_t halves[2] = {select_bytes<0x1404>(packed), select_bytes<0x3424>(packed)};
  std::uint32_t wide[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    std::uint32_t bits = (halves[i] & 0x7f007f00u) >> 1;
    const std::uint32_t nan = (bits + 0x00800080u) >> 14 & 0x00010001u;
    bits |= nan * 0x7c00u | (halves[i] & 0x80008000u);
    wide[i] = multiply_f16x2(bits, 0x5c005c00u);  // 256
  }
  return make_uint2(wide[0], wide[1]);
#endif
}

// The dot product of 8 bf16 with 8 others, in f32, in their order.
__device__ __forceinline__ float dot_bf16x8(uint4 a, uint4 b) {
  const std::uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum = fmaf(__uint_as_float(x[i] << 16), __uint_as_float(y[i] << 16), sum);
    sum = fmaf(__uint_as_float(x[i] & 0xffff0000u), __uint_as_float(y[i] & 0xffff0000u), sum);
  }
  return sum;
}

// log2(2^a + 2^b), infinities too; NaN if either is.
__device__ __forceinline__ float log2_add(float a, float b) {
  if (a == b) return a + 1.0f;
  const float larger = a > b ? a : b, smaller = a > b ? b : a;
  return larger + log2f(1.0f + exp2f(smaller - larger));
}

template <class T>
__host__ __device__ constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

// Divides by the same number again and again, faster than `/` and `%`.
class FastDivmod {
 public:
  __host__ __device__ explicit FastDivmod(std::uint32_t divisor = 1)
      : divisor_(divisor), inverse_(0xffffffffu / divisor) {}

  struct Result {
    std::uint32_t quotient, remainder;
  };
  __device__ Result divide(std::uint32_t number) const {
    // One less than the quotient at most, for the inverse lacks at most 1 of 2^32 / divisor.
    std::uint32_t quotient = __umulhi(number, inverse_);
    std::uint32_t remainder = number - quotient * divisor_;
    if (remainder >= divisor_) {
      ++quotient;
      remainder -= divisor_;
    }
    return {quotient, remainder};
  }

 private:
  std::uint32_t divisor_, inverse_;
};

}  // namespace winnow::device
