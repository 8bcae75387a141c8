// Exchanges inside a warp and inside the quads (4 neighbouring lanes) that share a row of a matrix
// fragment. Device code only; the whole warp must call each.
#pragma once

#include <cstdint>

namespace winnow::device {

inline constexpr unsigned kFullWarp = 0xffffffffu;

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, 1));
  return fmaxf(x, __shfl_xor_sync(kFullWarp, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(kFullWarp, x, 1);
  return x + __shfl_xor_sync(kFullWarp, x, 2);
}

// The sum over all lanes, in every lane.
template <class T>
__device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(kFullWarp, x, distance);
  }
  return x;
}

// The sum over this lane and those below.
__device__ __forceinline__ int warp_prefix(int x, int lane) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int below = __shfl_up_sync(kFullWarp, x, distance);
    if (lane >= distance) x += below;
  }
  return x;
}

// Lanes kDistance apart hold sums for the same 2 * kHalf columns: each keeps half of the columns
// and adds the other's part to it.
template <int kHalf, int kDistance>
__device__ __forceinline__ void halve_columns(float (&sums)[16]) {
  const bool upper = threadIdx.x & kDistance;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float give = upper ? sums[i] : sums[i + kHalf];
    const float keep = upper ? sums[i + kHalf] : sums[i];
    sums[i] = keep + __shfl_xor_sync(kFullWarp, give, kDistance);
  }
}

// Transposes the 4x4 matrix of words whose row q is held by lane q of each quad: afterwards lane q
// holds column q, so w[k] is what lane k had in w[q]. Two butterfly steps of two words each.
__device__ __forceinline__ void quad_transpose(std::uint32_t (&w)[4], int lane) {
  const bool odd = lane & 1;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {  // 2x2 blocks: swap w[i + 1] of even lanes with w[i] of odd ones
    const std::uint32_t got = __shfl_xor_sync(kFullWarp, odd ? w[i] : w[i + 1], 1);
    w[i] = odd ? got : w[i];
    w[i + 1] = odd ? w[i + 1] : got;
  }
  const bool high = lane & 2;
#pragma unroll
  for (int i = 0; i < 2; ++i) {  // the same for blocks of two
    const std::uint32_t got = __shfl_xor_sync(kFullWarp, high ? w[i] : w[i + 2], 2);
    w[i] = high ? got : w[i];
    w[i + 2] = high ? w[i + 2] : got;
  }
}

}  // namespace winnow::device
