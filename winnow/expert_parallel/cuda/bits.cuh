// Weights and other numbers of 2 or 4 bytes as bits, and as floats. Device code only.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "winnow/core/dtype.h"

namespace winnow::expert_parallel {

__device__ __forceinline__ std::int64_t bytes_of(DType dtype) {
  return dtype == DType::f32 ? 4 : 2;
}
__device__ __forceinline__ float to_float(DType dtype, std::uint32_t bits) {
  if (dtype == DType::f32) return __uint_as_float(bits);
  if (dtype == DType::bf16) return __uint_as_float(bits << 16);
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}
__device__ __forceinline__ std::uint32_t from_float(DType dtype, float value) {
  if (dtype == DType::f32) return __float_as_uint(value);
  if (dtype == DType::bf16) return __bfloat16_as_ushort(__float2bfloat16_rn(value));
  return __half_as_ushort(__float2half_rn(value));
}
__device__ __forceinline__ std::uint32_t load_bits(const std::byte* table, std::int64_t i,
                                                   DType dtype) {
  if (dtype == DType::f32) return reinterpret_cast<const std::uint32_t*>(table)[i];
  return reinterpret_cast<const std::uint16_t*>(table)[i];
}
__device__ __forceinline__ void store_bits(std::byte* table, std::int64_t i, DType dtype,
                                           std::uint32_t bits) {
  if (dtype == DType::f32) {
    reinterpret_cast<std::uint32_t*>(table)[i] = bits;
  } else {
    reinterpret_cast<std::uint16_t*>(table)[i] = static_cast<std::uint16_t>(bits);
  }
}

}  // namespace winnow::expert_parallel
