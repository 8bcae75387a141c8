// Scores as keys that order them as unsigned integers: NaN is 0, then -inf, ..., +inf; -0 is +0.
#pragma once

#include <cstdint>

namespace winnow::indexer::gpu {

inline constexpr std::uint32_t kLowestScoreKey = 0x007fffffu;  // of -inf

// Of a score that is neither NaN nor -0.
__device__ __forceinline__ std::uint32_t key_of_number(float score) {
  const std::uint32_t bits = __float_as_uint(score);
  const std::uint32_t sign = static_cast<std::uint32_t>(static_cast<int>(bits) >> 31);
  return bits ^ (sign | 0x80000000u);
}
__device__ __forceinline__ std::uint32_t key_of(float score) {
  return score != score ? 0u : key_of_number(score + 0.0f);
}
__device__ __forceinline__ float score_of(std::uint32_t key) {
  if (key == 0) return __uint_as_float(0x7fffffffu);
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

}  // namespace winnow::indexer::gpu
