// What the CUDA kernels on a paged cache share: units of 16 bytes, and the position term of a tile.
// Device code only.
//
// A tile is as many tokens as make 32 bytes of one row of the value cache: 16 of the narrow types,
// 8 of f32. One warp handles a tile. Whatever the dtype, a lane then reads head_size / 16 units of
// a tile of K, of V, and of r.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "winnow/core/rows.h"
#include "winnow/device/common/math.cuh"
#include "winnow/device/common/memory.cuh"
#include "winnow/device/common/warp.cuh"

namespace winnow::paged_xl {

inline constexpr int kWarpSize = 32;

using Unit = uint4;  // 16 bytes

template <class T>
inline constexpr int kX = 16 / static_cast<int>(sizeof(T));  // elements of a unit
template <class T>
inline constexpr int kTile = 2 * kX<T>;  // tokens

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half from_float(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float(float x) {
  return __float2bfloat16_rn(x);
}

// The elements of a unit in f32.
__device__ __forceinline__ void widen(const Unit& unit, float (&to)[4]) {
  to[0] = __uint_as_float(unit.x);
  to[1] = __uint_as_float(unit.y);
  to[2] = __uint_as_float(unit.z);
  to[3] = __uint_as_float(unit.w);
}
template <class T>
__device__ __forceinline__ void widen(const Unit& unit, float (&to)[8]) {
  const std::uint32_t words[4] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 2 && !std::is_same_v<T, __half>) {
      to[2 * i] = __uint_as_float(words[i] << 16);
      to[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    } else {
      const float2 two = __half22float2(reinterpret_cast<const __half2&>(words[i]));
      to[2 * i] = two.x;
      to[2 * i + 1] = two.y;
    }
  }
}
template <class T>
__device__ __forceinline__ void widen_as(const Unit& unit, float (&to)[kX<T>]) {
  if constexpr (sizeof(T) == 4) {
    widen(unit, to);
  } else {
    widen<T>(unit, to);
  }
}

__device__ __forceinline__ Unit zero_unit() { return {0, 0, 0, 0}; }

// Sixteen bytes that the kernel reads once. kAligned: the address is a multiple of 16, else only of
// the element's size.
template <class T, bool kAligned, bool kReused = false>
__device__ __forceinline__ Unit load_unit(const T* from) {
  if constexpr (kAligned) {
    return kReused ? device::load_again(from) : device::load_once(from);
  } else if constexpr (sizeof(T) == 4) {
    const auto* words = reinterpret_cast<const std::uint32_t*>(from);
    return {__ldg(words), __ldg(words + 1), __ldg(words + 2), __ldg(words + 3)};
  } else {
    const auto* halves = reinterpret_cast<const unsigned short*>(from);
    const auto pair = [halves](int i) {
      return std::uint32_t{__ldg(halves + i)} | std::uint32_t{__ldg(halves + i + 1)} << 16;
    };
    return {pair(0), pair(2), pair(4), pair(6)};
  }
}

// The same for any address of an element.
template <class T>
__device__ __forceinline__ Unit load_unit(const T* from) {
  if (reinterpret_cast<std::uintptr_t>(from) % 16 != 0) return load_unit<T, false>(from);
  return __ldg(reinterpret_cast<const uint4*>(from));
}

// Keeps the first `count` elements and makes the others 0: what they hold must not matter.
template <class T>
__device__ __forceinline__ Unit keep_first(Unit unit, int count) {
  std::uint32_t words[4] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      if (i >= count) words[i] = 0;
    } else {
      if (2 * i >= count) words[i] = 0;
      if (2 * i + 1 == count) words[i] &= 0xffffu;
    }
  }
  return {words[0], words[1], words[2], words[3]};
}

template <class Pointer>
__device__ __forceinline__ std::int64_t offset_of(const Rows<Pointer>& rows, std::int64_t i0,
                                                  std::int64_t i1) {
  return i0 * rows.stride0 + i1 * rows.stride1;
}
template <class T, class Pointer>
__device__ __forceinline__ auto row_of(const Rows<Pointer>& rows, std::int64_t i0,
                                       std::int64_t i1 = 0) {
  if constexpr (std::is_const_v<std::remove_pointer_t<Pointer>>) {
    return static_cast<const T*>(rows.data) + offset_of(rows, i0, i1);
  } else {
    return static_cast<T*>(rows.data) + offset_of(rows, i0, i1);
  }
}

// Lengths as they count: between 0 and what the other tensors hold.
struct Lengths {
  const std::int32_t* data = nullptr;
  int num_seqs = 0;
  int limit = 0;
  __device__ __forceinline__ int operator[](int s) const {
    return min(max(__ldg(data + s), 0), limit);
  }
};

// The rows of r for one tile of one head, and their products with query + v. The units of a row
// lie side by side in the lanes of a group; several rows are read at a time.
template <class T, int kMaxDim>
struct RelativeTile {
  static constexpr int kUnits = kMaxDim / 16;  // per lane
  static constexpr int kRowUnits = kMaxDim / kX<T>;
  static constexpr int kGroup = kRowUnits < kWarpSize ? kRowUnits : kWarpSize;  // lanes of a row
  static constexpr int kParts = kRowUnits / kGroup;   // units of a row in a lane
  static constexpr int kAtOnce = kWarpSize / kGroup;  // rows
  static constexpr int kRows = kTile<T> / kAtOnce;    // of a lane
  static_assert(kRows * kParts == kUnits && kRows <= kGroup);

  Unit units[kUnits];

  // query + v: the lane's columns.
  struct Query {
    float columns[kParts][kX<T>];
    __device__ __forceinline__ void load(const T* query, const T* bias, int dim, int lane) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int i = 0; i < kX<T>; ++i) columns[part][i] = 0;
        const int first = (lane % kGroup + part * kGroup) * kX<T>;
        if (first >= dim) continue;
        float of_query[kX<T>], of_bias[kX<T>];
        widen_as<T>(load_unit<T>(query + first), of_query);
        widen_as<T>(load_unit<T>(bias + first), of_bias);
#pragma unroll
        for (int i = 0; i < kX<T>; ++i) columns[part][i] = of_query[i] + of_bias[i];
      }
    }
  };

  // Row t of the tile has the distance `distance - t`; those below 0 are not read.
  template <bool kAligned>
  __device__ __forceinline__ void load(const T* r, std::int64_t stride, int distance, int dim,
                                       int lane) {
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const int row = distance - (k * kAtOnce + lane / kGroup);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const int column = (lane % kGroup + part * kGroup) * kX<T>;
        units[k * kParts + part] = row >= 0 && column < dim
                                       ? load_unit<T, kAligned, true>(r + row * stride + column)
                                       : zero_unit();
      }
    }
  }

  // The product of row lane % kTile. The whole warp must call.
  __device__ __forceinline__ float dot(const Query& query, int lane) const {
    float sums[kRows];
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      sums[k] = 0;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        float r[kX<T>];
        widen_as<T>(units[k * kParts + part], r);
#pragma unroll
        for (int i = 0; i < kX<T>; ++i) sums[k] = fmaf(query.columns[part][i], r[i], sums[k]);
      }
    }
    // Sums over the lanes of a group. While a lane has several rows, it keeps half of them in
    // exchange for its partner's half of the others.
    int count = kRows;
#pragma unroll
    for (int distance = kGroup / 2; distance > 0; distance /= 2) {
      if (count > 1) {
        count /= 2;
        const bool upper = lane & distance;
#pragma unroll
        for (int i = 0; i < kRows / 2; ++i) {
          if (i >= count) break;
          const float give = upper ? sums[i] : sums[i + count];
          const float keep = upper ? sums[i + count] : sums[i];
          sums[i] = keep + __shfl_xor_sync(device::kFullWarp, give, distance);
        }
      } else {
        sums[0] += __shfl_xor_sync(device::kFullWarp, sums[0], distance);
      }
    }
    // Lane i of a group now holds row i / (kGroup / kRows).
    const int token = lane % kTile<T>;
    const int source = token % kAtOnce * kGroup + token / kAtOnce * (kGroup / kRows);
    return __shfl_sync(device::kFullWarp, sums[0], source);
  }
};

}  // namespace winnow::paged_xl
