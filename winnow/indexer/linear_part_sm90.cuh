// The weighted sums of f8_e4m3 with one instruction for each head and key, sm90.
//
// max(0, x) = (x + |x|) / 2, so
//   sum over heads of weight * max(0, dot(head, key))
//     = sum over heads of weight / 2 * |dot(head, key)| + dot(linear row, key),
//   linear row = sum over heads of weight / 2 * head.
// The linear row of a query makes further columns of the product on the tensor cores. The CUDA
// cores, which are the limit with f8, keep one instruction for each head and key: an absolute value
// is a modifier of its operand. Products are finite with f8_e4m3; infinite ones would give
// inf - inf here.
//
// A linear row is stored as kLinearTerms rows of f8_e4m3, the terms: it is the sum of term t times
// unit / 16^t. Each term leaves an error of at most a 16th, which the next one takes up, so that
// the error of the row is at most 2^-16 of its bound.
//
// Where no dot product is positive the sum is 0, but the two parts cancel only nearly, so that such
// sums are set to 0. To find them the product is computed negated: a sign bit then says that a dot
// product is positive, as a sum of 0 is +0 on the tensor cores, and their NaN has no sign bit. One
// instruction tests two or three signs, and almost every row has a positive dot product among the
// few that a warp tests first.
#pragma once

#include <cstdint>

#include "winnow/device/common/arithmetic.cuh"
#include "winnow/device/common/shared.cuh"
#include "winnow/device/common/warp.cuh"
#include "winnow/device/sm90/barrier.cuh"
#include "winnow/device/sm90/chunk.cuh"

namespace winnow::indexer::sm90_detail {

inline constexpr int kLinearTerms = 4;
inline constexpr int kLinearColumns = 8;  // the terms of two queries, or of one query twice

// What a lane holds of the linear parts of one product, for each of its queries.
template <class Shape>
struct LinearPart {
  static constexpr int kQueries = Shape::kSideQueries;
  static constexpr int kHeldOfQuery = Shape::kHeads / 4;  // columns
  static constexpr int kFirstHeld = 3;  // of them, which look() tests; odd, as is the rest
  static_assert(kQueries * kLinearTerms <= kLinearColumns && Shape::kPanels == 1);

  // The scales of the terms' columns 2 (lane % 4) + {0, 1}.
  float scale[2];
  // Bit n: the sum of query n must not be split, as its weights are too large, too small or not
  // finite.
  unsigned whole;

  // A bound of the elements of a linear row, and a power of two, `unit`, with bound / unit < 256.
  // `halves`: half of the weights, in the order of WeightedSum.
  struct Bound {
    float bound, unit;
    __device__ __forceinline__ bool split() const {
      return bound == 0.0f || (bound >= 0x1p-60f && bound <= 0x1p100f);
    }
  };
  __device__ __forceinline__ static void bounds(const float4* halves, Bound (&of_query)[kQueries]) {
    const float4 own = halves[threadIdx.x % 32];
    float magnitude = fabsf(own.x) + fabsf(own.y) + fabsf(own.z) + fabsf(own.w);
#pragma unroll
    for (int step = 1; step < Shape::kHeads / 4; step *= 2) {
      magnitude += __shfl_xor_sync(device::kFullWarp, magnitude, step);
    }
#pragma unroll
    for (int query = 0; query < kQueries; ++query) {
      const float bound =
          448.0f * __shfl_sync(device::kFullWarp, magnitude, query * Shape::kHeads / 4);
      const float power = __uint_as_float(__float_as_uint(bound) & 0x7f800000u) * 0x1p-7f;
      of_query[query] = {bound, bound == 0.0f ? 1.0f : power};
    }
  }

  // Writes the terms as rows of 128 bytes at `terms`. Heads and weights must have arrived, and
  // nothing may read earlier terms. `warps` warps call it, this one as number `warp`; a barrier
  // must follow. Heads of weight 0 are overwritten with zeros, except NaN, so that look() does not
  // find their products.
  __device__ __forceinline__ void form(const float4* halves, std::uint32_t heads,
                                       std::uint32_t terms, int warp, int warps) {
    const int lane = threadIdx.x % 32;
    Bound of_query[kQueries];
    bounds(halves, of_query);
    whole = 0;
#pragma unroll
    for (int query = 0; query < kQueries; ++query) {
      if (!of_query[query].split()) whole |= 1u << query;
      if (lane % 4 / 2 % kQueries == query) {
        scale[0] = -of_query[query].unit * (lane % 2 ? 0x1p-8f : 1.0f);
        scale[1] = -of_query[query].unit * (lane % 2 ? 0x1p-12f : 0x1p-4f);
      }
    }
    // Four lanes have 16 bytes of a row; eight groups of them take every eighth head.
    const int group = lane / 4;
    for (int item = warp; item < 8 * kQueries; item += warps) {
      const int query = item / 8, column16 = item % 8;
      float row[4] = {};
#pragma unroll
      for (int n = 0; n < Shape::kHeads / 16; ++n) {
        const float4 four = halves[(query * Shape::kHeads + 16 * n) / 4 + group / 2];
        const float half[2] = {group % 2 ? four.y : four.x, group % 2 ? four.w : four.z};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int head = query * Shape::kHeads + 16 * n + 8 * i + group;
          const std::uint32_t at = heads + device::chunk_offset(head, column16) + lane % 4 * 4;
          std::uint32_t word = device::ld_shared<std::uint32_t>(at);
          if (half[i] == 0.0f) {
            const std::uint32_t nan = ((word & 0x7f7f7f7fu) + 0x01010101u & 0x80808080u) >> 7;
            word &= nan * 0xff;
            device::st_shared(at, word);
          }
          float value[4];
          device::unpack_f8(word, value);
#pragma unroll
          for (int c = 0; c < 4; ++c) row[c] = fmaf(half[i], value[c], row[c]);
        }
      }
      const float unit =
          kQueries == 1 || query == 0 ? of_query[0].unit : of_query[kQueries - 1].unit;
      const float inverse = __uint_as_float(0x7f000000u - __float_as_uint(unit));
#pragma unroll
      for (int c = 0; c < 4; ++c) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2) {
          row[c] += __shfl_xor_sync(device::kFullWarp, row[c], step);
        }
        row[c] *= inverse;
      }
      std::uint32_t own = 0;  // the term that this group of lanes stores
#pragma unroll
      for (int term = 0; term < kLinearTerms; ++term) {
        const std::uint32_t rounded = device::pack_f8(row);
        if (group % kLinearTerms == term) own = rounded;
        float value[4];
        device::unpack_f8(rounded, value);
#pragma unroll
        for (int c = 0; c < 4; ++c) row[c] = 16.0f * (row[c] - value[c]);
      }
      if (kQueries == 1 || group < kLinearTerms) {
        device::st_shared(
            terms + device::chunk_offset(query * kLinearTerms + group, column16) + lane % 4 * 4,
            own);
      }
    }
    device::fence_proxy_async_shared();
  }

  // The linear parts of the sums that this lane keeps in the exchange with the lane two apart
  // (WeightedSum::Halves): an upper lane keeps those of the second query, or of one query's second
  // row. They are added after the exchange, so that bits do not depend on which lane keeps a sum.
  template <int kColumns>
  __device__ __forceinline__ void parts(const float (&product)[kColumns],
                                        float (&part)[kQueries]) const {
    const float* const terms = product + kColumns - 4;
    const bool upper = threadIdx.x % 32 & 2;
    if constexpr (kQueries == 2) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        part[r] = fmaf(scale[0], terms[2 * r], scale[1] * terms[2 * r + 1]);
      }
    } else {
      part[0] =
          fmaf(scale[0], upper ? terms[2] : terms[0], scale[1] * (upper ? terms[3] : terms[1]));
    }
  }
  // Whether the sums that this lane keeps are split.
  __device__ __forceinline__ bool splits_kept() const {
    const bool upper = threadIdx.x % 32 & 2;
    return (whole >> (kQueries == 2 && upper) & 1) == 0;
  }

  // The bits of positive() for the whole warp, from the first kFirstHeld columns of each lane.
  template <int kColumns>
  __device__ __forceinline__ static std::uint32_t look(const float (&product)[kColumns]) {
    return __reduce_or_sync(device::kFullWarp, positive<0, kFirstHeld>(product));
  }
  // Sets the sums of rows without a positive dot product to 0, unless they are NaN: all that this
  // lane holds of them. `found`: the result of look().
  template <int kColumns, class Halves>
  __device__ __forceinline__ static void clear_zeros(std::uint32_t found,
                                                     const float (&product)[kColumns],
                                                     Halves& halves) {
    if (found == ~0u) [[likely]]
      return;
    found |= __reduce_or_sync(device::kFullWarp, positive<kFirstHeld, kHeldOfQuery>(product));
    const bool upper = threadIdx.x % 32 & 2;
#pragma unroll
    for (int s = 0; s < kQueries; ++s) {
      const int sum = (upper ? kQueries : 0) + s;
      const bool zero = (found >> (8 * sum + threadIdx.x % 32 / 4) & 1) == 0;
      const auto clear = [&](float& x) { x = zero && x == x ? 0.0f : x; };
      clear(halves.kept[s]), clear(halves.got[s]), clear(halves.linear[s]);
    }
  }

 private:
  // Bit 8 s + lane / 4: whether one of this lane's columns [kFirst, kEnd) of a query has a positive
  // dot product in sum s of WeightedSum, which is a query and a row. If there are only two sums,
  // the bits of s + 2 are those of s.
  template <int kFirst, int kEnd, int kColumns>
  __device__ __forceinline__ static std::uint32_t positive(const float (&product)[kColumns]) {
    constexpr int kSums = 2 * kQueries;
    static_assert(kEnd - kFirst >= 3 && (kEnd - kFirst) % 2 == 1);
    std::uint32_t sign[kSums];
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
      const auto dot = [&](int n) {
        const int i = s / 2 * kHeldOfQuery + n;
        return product[i / 2 * 4 + 2 * (s % 2) + i % 2];
      };
      sign[s] = device::any_sign(dot(kFirst), dot(kFirst + 1), dot(kFirst + 2));
#pragma unroll
      for (int n = kFirst + 3; n < kEnd; n += 2) {
        sign[s] = device::any_sign(sign[s], dot(n), dot(n + 1));
      }
    }
    // Each sign fills a byte.
    const std::uint32_t low = device::select_bytes<0x00fb>(sign[0], sign[1]);
    const std::uint32_t high =
        kSums == 4 ? device::select_bytes<0x00fb>(sign[kSums - 2], sign[kSums - 1]) : low;
    const std::uint32_t all = device::select_bytes<0x5410>(low, high);
    return all & 0x01010101u << threadIdx.x % 32 / 4;
  }
};

// Where sums are not split.
struct NoLinearPart {
  static constexpr unsigned whole = 0;
};

}  // namespace winnow::indexer::sm90_detail
