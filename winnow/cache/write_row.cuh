// One row into a paged cache, on a GPU: lanes of a warp hold neighbouring columns of it, and the
// whole warp calls what quantises them. Included by .cu files.
#pragma once

#include <cstdint>
#include <type_traits>

#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include "winnow/cache/cache_view.cuh"
#include "winnow/core/f8_scale.h"
#include "winnow/core/slots.h"
#include "winnow/device/common/warp.cuh"

namespace winnow::cache {

// Reads the slot once for each use: another stream may rewrite it.
__device__ __forceinline__ std::int64_t read_slot(const Slots& slots, std::int64_t row) {
  return slots.wide ? static_cast<const volatile std::int64_t*>(slots.data)[row]
                    : static_cast<const volatile std::int32_t*>(slots.data)[row];
}

// The bits of the largest magnitude of what kLanes neighbouring lanes hold. Magnitudes order as
// their bits do, NaN above infinity above the rest.
template <int kLanes, int kCount>
__device__ __forceinline__ std::uint32_t largest_bits(const float (&x)[kCount]) {
  std::uint32_t largest = 0;
#pragma unroll
  for (int c = 0; c < kCount; ++c) largest = max(largest, __float_as_uint(x[c]) & 0x7fffffffu);
  if constexpr (kLanes == 32) {
    return __reduce_max_sync(device::kFullWarp, largest);
  } else {
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
      largest = max(largest, __shfl_xor_sync(device::kFullWarp, largest, distance));
    }
    return largest;
  }
}

__device__ __forceinline__ std::uint8_t to_f8(float x) {
  return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
}

// A lane's share of a row, moved whole.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Share {
  T elements[kCount];
};

// ---- latent rows

// The scale of a group that kLanes lanes hold, and the columns in f8.
template <int kLanes, int kCount>
__device__ __forceinline__ float quantise_group(const float (&x)[kCount],
                                                std::uint8_t (&f8)[kCount]) {
  const float scale = sparse_mla::cache_scale(__uint_as_float(largest_bits<kLanes>(x)));
  // The inverse of a power of two is exact, and so is the product, unless it is far below what f8
  // can hold.
  const float inverse = __uint_as_float((254u << 23) - __float_as_uint(scale));
#pragma unroll
  for (int c = 0; c < kCount; ++c) {
    f8[c] = scale != scale ? 0x7f : to_f8(__fmul_rn(x[c], inverse));
  }
  return scale;
}

// Where a row of the cache is; slots below 2^31.
template <sparse_mla::CacheFormat kFormat>
struct LatentPlace {
  static constexpr bool kWide = kFormat == sparse_mla::CacheFormat::fp8_656;
  using Row = std::conditional_t<kWide, sparse_mla::Row656, sparse_mla::Row584>;

  std::uint8_t *row, *scales;

  __device__ __forceinline__ LatentPlace(const sparse_mla::CacheView<std::uint8_t>& cache,
                                         std::uint32_t slot) {
    const std::uint32_t block = slot / cache.block_size, offset = slot % cache.block_size;
    row = cache.row(block, offset);
    scales = kWide ? row + sparse_mla::Row656::kScaleOffset : cache.scales_584(block, offset);
  }
  // Writes kCount columns of bf16 from `column` on, where `inside`. kQuantised: they may be of
  // those in f8.
  template <bool kQuantised = true, int kCount>
  __device__ __forceinline__ void write(int column, bool inside,
                                        const Share<std::uint32_t, kCount>& brain) const {
    using Words = Share<std::uint32_t, kCount>;
    if constexpr (kFormat == sparse_mla::CacheFormat::bf16) {
      if (inside) *reinterpret_cast<Words*>(row + 2 * column) = brain;
    } else {
      constexpr int kLanes = Row::kGroup / (2 * kCount);
      if constexpr (kQuantised) {
        float x[2 * kCount];
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          x[2 * i] = __uint_as_float(brain.elements[i] << 16);
          x[2 * i + 1] = __uint_as_float(brain.elements[i] & 0xffff0000u);
        }
        Share<std::uint8_t, 2 * kCount> f8;
        const float scale = quantise_group<kLanes>(x, f8.elements);
        if (inside && column < Row::kQuantised) {
          *reinterpret_cast<Share<std::uint8_t, 2 * kCount>*>(row + column) = f8;
          if (column % Row::kGroup == 0) {
            if constexpr (kWide) {
              reinterpret_cast<float*>(scales)[column / Row::kGroup] = scale;
            } else {
              scales[column / Row::kGroup] = sparse_mla::scale_to_ue8m0(scale);
            }
          }
        }
      }
      if (inside && column >= Row::kQuantised) {
        *reinterpret_cast<Words*>(row + Row::kRopeOffset + 2 * (column - Row::kQuantised)) = brain;
        // The byte of padding.
        if (!kWide && column == Row::kQuantised) scales[Row::kGroups] = 0;
      }
    }
  }
};

// ---- keys

// f8_e4m3(x / scale) of a row of kCount columns in each of kLanes lanes, and its scale: see
// quantize().
template <int kLanes, int kCount>
__device__ __forceinline__ float quantise_key(const float (&x)[kCount], bool power_of_two,
                                              std::uint8_t (&f8)[kCount]) {
  constexpr std::uint32_t kInfinityBits = 0x7f800000u, kMantissa = 0x007fffffu;
  const std::uint32_t largest = largest_bits<kLanes>(x);
  const bool finite = largest < kInfinityBits;
  float scale = __fdiv_rn(fmaxf(__uint_as_float(largest), kLeastAmax), kLargestF8);
  if (power_of_two) {  // up to the next exponent, unless it is one already
    scale = __uint_as_float((__float_as_uint(scale) + kMantissa) & ~kMantissa);
  }
#pragma unroll
  for (int c = 0; c < kCount; ++c) {
    const std::uint8_t rounded = to_f8(__fdiv_rn(x[c], scale));
    f8[c] = finite ? rounded : 0x7f;
  }
  return finite ? scale : __uint_as_float(0x7fc00000u);
}

// The first element of the row of a slot that the pages hold, and its scale.
struct KeyPlace {
  std::uint8_t* row;
  float* scale;

  __device__ __forceinline__ KeyPlace(const Rows<std::uint8_t*>& pages, std::int64_t slot, int d) {
    std::uint8_t* page = pages.data + slot / indexer::kPageRows * pages.stride0;
    const int place = static_cast<int>(slot % indexer::kPageRows);
    row = page + place * d;
    scale = reinterpret_cast<float*>(page + indexer::kPageRows * d) + place;
  }
};

}  // namespace winnow::cache
