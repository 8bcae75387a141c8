// Arithmetic instructions for which CUDA C++ has no function. Device code only.
#pragma once

#include <cstdint>

namespace winnow::device {

// 2^x with a relative error of about 2^-22. 2^-inf is 0, and results below 2^-126 become 0.
__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// max(x, 0), or NaN if x is NaN.
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

// The same as f16x2; values that round beyond +-65504 become infinite.
__device__ __forceinline__ std::uint32_t pack_f16(float low, float high) {
  std::uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
// The two f16 of a word as f32, the lower half first.
__device__ __forceinline__ float2 unpack_f16(std::uint32_t packed) {
  float2 x;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.f32.f16 %0, low;\n"
      "cvt.f32.f16 %1, high;\n"
      "}"
      : "=f"(x.x), "=f"(x.y)
      : "r"(packed));
  return x;
}

// The products of two pairs of f16, rounded to nearest even.
__device__ __forceinline__ std::uint32_t multiply_f16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// Four f32 rounded to nearest even as f8_e4m3, the first in the lowest byte; values beyond +-448
// become +-448, NaN stays NaN. sm_89 and newer.
__device__ __forceinline__ std::uint32_t pack_f8(const float (&x)[4]) {
  std::uint32_t packed;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n"
      "}"
      : "=r"(packed)
      : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]));
  return packed;
}

// The four f8_e4m3 of a word as f32, the one in the lowest byte first. sm_89 and
// newer; widen_f8() (math.cuh) serves others.
__device__ __forceinline__ void unpack_f8(std::uint32_t packed, float (&x)[4]) {
  asm("{\n"
      ".reg .b16 low, high, a, b;\n"
      ".reg .b32 pair;\n"
      "mov.b32 {low, high}, %4;\n"
      "cvt.rn.f16x2.e4m3x2 pair, low;\n"
      "mov.b32 {a, b}, pair;\n"
      "cvt.f32.f16 %0, a;\n"
      "cvt.f32.f16 %1, b;\n"
      "cvt.rn.f16x2.e4m3x2 pair, high;\n"
      "mov.b32 {a, b}, pair;\n"
      "cvt.f32.f16 %2, a;\n"
      "cvt.f32.f16 %3, b;\n"
      "}"
      : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
      : "r"(packed));
}

// A permutation of bytes. Hex digit i of `kSelector`, from the right, is the index of the byte of
// `word` that becomes byte i of the result. An index plus 8 gives that byte's sign bit eight times.
template <std::uint32_t kSelector>
__device__ __forceinline__ std::uint32_t select_bytes(std::uint32_t word) {
  std::uint32_t selected;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(selected) : "r"(word), "n"(kSelector));
  return selected;
}

// The same of two words, whose bytes count from 0 to 3 and from 4 to 7.
template <std::uint32_t kSelector>
__device__ __forceinline__ std::uint32_t select_bytes(std::uint32_t low, std::uint32_t high) {
  std::uint32_t selected;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(selected) : "r"(low), "r"(high), "n"(kSelector));
  return selected;
}

// Whether one of the numbers has a sign bit, in bit 31; the bits below say nothing. The operands
// are f32 registers: moved to integers first, accumulators make ptxas serialise wgmma (C7511).
__device__ __forceinline__ std::uint32_t any_sign(float a, float b, float c) {
  std::uint32_t any;
  asm("lop3.b32 %0, %1, %2, %3, 0xfe;" : "=r"(any) : "f"(a), "f"(b), "f"(c));
  return any;
}
__device__ __forceinline__ std::uint32_t any_sign(std::uint32_t any_before, float a, float b) {
  std::uint32_t any;
  asm("lop3.b32 %0, %1, %2, %3, 0xfe;" : "=r"(any) : "r"(any_before), "f"(a), "f"(b));
  return any;
}

// The elementwise products of two bf16x2, rounded to nearest even.
__device__ __forceinline__ std::uint32_t multiply_bf16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product;
#if __CUDA_ARCH__ >= 900
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
#else  // which has no multiplication but with an addition, here of -0
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
#endif
  return product;
}

}  // namespace winnow::device
