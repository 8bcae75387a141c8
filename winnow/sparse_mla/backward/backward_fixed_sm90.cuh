// Backward of top-k sparse MLA attention, sm90, the deterministic mode: sums of dkv as integers,
// whose additions have no order.
//
// Each row of dkv has a power of two as scale, such that neither its addends nor its sum can become
// too large. An addend is rounded by adding 1.5 * 2^23 to its product with the scale: the bits of
// the sum count upwards by one for each unit. They are added as they are, and what 1.5 * 2^23
// contributes to them is taken off at the end, for all addends of a row at once.
//
// Two columns share a 64-bit word, as (high << 32) + low: without what is taken off, the halves of
// the sum are the sums of the signed halves, once the borrow of a negative low half is given back.
#pragma once

#include <cstdint>

#include "winnow/device/common/warp.cuh"

namespace winnow::sparse_mla::backward_fixed_detail {

// The state of a row of dkv whose sums are integers.
struct RowState {
  float scale;            // from values to units, a power of two; 0: nothing was added yet
  float units;            // not less than the magnitude of a sum, whatever the order
  std::uint64_t addends;  // of each sum
};

inline constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23
inline constexpr std::uint32_t kRounderBits = 0x4b400000u;

// What a warp holds of 8 rows and 32 columns, v as the accumulators of four neighbouring j
// (device/sm90/wgmma.cuh), of which `scale` is that of the lane's own row for `r`: w[k] are two
// columns, 2 (lane % 16) and one more, of row lane / 16 * 4 + k. So 16 lanes have 128 bytes of a
// row: the quads of four rows exchange what they hold of 4 x 8 columns.
__device__ __forceinline__ void row_words(const float* v, int r, float scale, int lane,
                                          unsigned long long (&w)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const std::uint32_t low = __float_as_uint(fmaf(v[4 * j + 2 * r], scale, kRounder));
    const std::uint32_t high = __float_as_uint(fmaf(v[4 * j + 2 * r + 1], scale, kRounder));
    w[j] = static_cast<unsigned long long>(high) << 32 | low;
  }
  // Transposes: row k of the four, columns 8 j -> lane's own j, word k.
#pragma unroll
  for (int bit = 0; bit < 2; ++bit) {
    const bool upper = lane >> (2 + bit) & 1;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int a = bit == 0 ? 2 * i : i, b = a + (1 << bit);
      const unsigned long long got =
          __shfl_xor_sync(device::kFullWarp, upper ? w[a] : w[b], 4 << bit);
      w[a] = upper ? got : w[a];
      w[b] = upper ? w[b] : got;
    }
  }
}

}  // namespace winnow::sparse_mla::backward_fixed_detail
