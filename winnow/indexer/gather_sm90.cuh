// How warps of sm90 copy the rows that the entries of a query name (chosen.cuh) into the swizzled
// chunks that wgmma reads (device/sm90/wgmma.cuh).
#pragma once

#include <algorithm>
#include <cstdint>

#include <cuda_bf16.h>

#include "winnow/device/common/arithmetic.cuh"
#include "winnow/device/common/math.cuh"
#include "winnow/device/common/shared.cuh"
#include "winnow/device/common/warp.cuh"
#include "winnow/device/sm90/copy.cuh"
#include "winnow/device/sm90/wgmma.cuh"
#include "winnow/indexer/chosen.cuh"

namespace winnow::indexer::chosen_sm90 {

using namespace gpu;

// The number in a column of a row of q or k.
__device__ __forceinline__ float number_of(const View& view, const char* row, int column) {
  if (!view.is_f8) {
    return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(row)[column]);
  }
  float numbers[4];
  device::unpack_f8(static_cast<std::uint8_t>(row[column]), numbers);
  return numbers[0];
}

// One of kWarps warps copies its part of 64 rows: rows 64 / kWarps * warp and on, of which lane l
// names the l-th; -1 becomes zeros. `first` is where row 0 begins in memory. 8 lanes copy 128 bytes
// of a row, a chunk's part of it; chunks are `chunk_stride` bytes apart.
template <int kWarps, int kChunks>
__device__ __forceinline__ void copy_rows(std::uint32_t destination, int chunk_stride,
                                          const char* first, std::int64_t stride, int row_bytes,
                                          int row, int warp, std::uint64_t policy) {
  constexpr int kRows = kTileEntries / kWarps;
  const int lane = threadIdx.x % 32;
  const std::uint32_t to = destination + device::chunk_offset(kRows * warp + lane / 8, lane % 8);
  const int column = lane % 8 * 16;
#pragma unroll
  for (int pass = 0; pass < kRows / 4; ++pass) {
    const int named = __shfl_sync(device::kFullWarp, row, 4 * pass + lane / 8);
    const char* const source = first + (named < 0 ? 0 : named) * stride;
    // Four rows further the swizzle differs by one bit of the column: 4 of 8.
    const std::uint32_t at = (to ^ (pass % 2 * 4 << 4)) + pass * 4 * 128;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const bool valid = named >= 0 && chunk * 128 + column < row_bytes;
      device::cp_async_zfill(at + chunk * chunk_stride, source + (valid ? chunk * 128 + column : 0),
                             valid, policy);
    }
  }
}

// The same for rows of 64 * kChunks f8_e4m3, which become bf16 on the way: 8 lanes load 64 bytes of
// a row. These are ordinary stores, which a fence_proxy_async_shared() of this thread shows to
// wgmma.
template <int kWarps, int kChunks>
__device__ __forceinline__ void widen_rows(std::uint32_t destination, int chunk_stride,
                                           const char* first, std::int64_t stride, int row,
                                           int warp) {
  constexpr int kRows = kTileEntries / kWarps, kPasses = kRows / 4;
  const int lane = threadIdx.x % 32;
  const std::uint32_t to = destination + device::chunk_offset(kRows * warp + lane / 8, lane % 8);
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    uint2 loaded[kPasses];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int named = __shfl_sync(device::kFullWarp, row, 4 * pass + lane / 8);
      loaded[pass] = {0, 0};
      if (named >= 0) {
        loaded[pass] = __ldg(
            reinterpret_cast<const uint2*>(first + named * stride + chunk * 64 + lane % 8 * 8));
      }
    }
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      float low[4], high[4];
      device::unpack_f8(loaded[pass].x, low);
      device::unpack_f8(loaded[pass].y, high);
      device::st_shared(
          (to ^ (pass % 2 * 4 << 4)) + pass * 4 * 128 + chunk * chunk_stride,
          make_uint4(device::pack_bf16(low[0], low[1]), device::pack_bf16(low[2], low[3]),
                     device::pack_bf16(high[0], high[1]), device::pack_bf16(high[2], high[3])));
    }
  }
}

}  // namespace winnow::indexer::chosen_sm90
