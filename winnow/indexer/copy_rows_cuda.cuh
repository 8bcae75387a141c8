// How a block of eight warps copies rows of queries or keys to a tile in shared memory, for GPUs of
// compute capability 8.0 and newer. f8_e4m3 becomes a type of 16 bits on the way, exactly.
#pragma once

#include <cstddef>
#include <cstdint>

#include "winnow/core/dtype.h"
#include "winnow/device/common/copy.cuh"
#include "winnow/device/common/math.cuh"
#include "winnow/device/common/places.cuh"
#include "winnow/device/common/shared.cuh"
#include "winnow/device/sm80/tile.cuh"

namespace winnow::indexer::cuda_detail {

using namespace winnow::device;

inline constexpr int kWarps = 8, kThreads = 32 * kWarps;
inline constexpr int kMostColumns = 128;  // of a row

// The four f8_e4m3 of a word in a type of 16 bits, the two lower ones in x.
template <DType kInto>
__device__ uint2 widen(std::uint32_t four) {
  const uint2 wide = widen_f8(four);
  if constexpr (kInto == DType::f16) return wide;
  const float2 low = unpack_f16(wide.x), high = unpack_f16(wide.y);
  return make_uint2(pack_bf16(low.x, low.y), pack_bf16(high.x, high.y));
}

// Copies of a tile: each warp copies its part of the rows, 8 lanes 64 numbers of a row. All lanes
// call row_of(local) together; it returns where a row begins, a multiple of 16 bytes, or null for a
// row of zeros. A row has `d` numbers, 64 or 128; columns from `d` on are not written.
//
// The copies run beside what the warp does between begin() and finish(). After wait() and a barrier
// of the block the rows are in the tile.
template <DType kDType, DType kInto, int kTileRows>
struct Copies {
  static_assert(kDType == kInto);
  static constexpr int kWarpRows = kTileRows / kWarps;

  // `any`: a valid address, passed for rows of zeros and never read.
  template <class RowOf>
  __device__ __forceinline__ void begin(Place<Tile<kTileRows, kMostColumns>> slot, int d, int warp,
                                        int lane, const char* any, std::uint64_t policy,
                                        const RowOf& row_of) {
#pragma unroll
    for (int pass = 0; pass < kWarpRows / 4; ++pass) {
      const int local = kWarpRows * warp + 4 * pass + lane / 8;
      const char* const row = row_of(local);
      const bool exists = row != nullptr;
      const char* const from = exists ? row + lane % 8 * kUnitBytes : any;
#pragma unroll
      for (int chunk = 0; chunk < kMostColumns / 64; ++chunk) {
        if (64 * chunk >= d) break;
        cp_async_zfill<128>(slot.unit(local, 8 * chunk + lane % 8),
                            exists ? from + chunk * kTileLine : any, exists, policy);
      }
    }
    cp_async_commit();
  }
  __device__ __forceinline__ void finish(Place<Tile<kTileRows, kMostColumns>>, int, int, int) {}
  __device__ __forceinline__ void wait() { cp_async_wait<0>(); }
};

template <DType kInto, int kTileRows>
struct Copies<DType::f8_e4m3, kInto, kTileRows> {
  static constexpr int kWarpRows = kTileRows / kWarps;
  uint2 loaded[kWarpRows / 4][kMostColumns / 64];

  template <class RowOf>
  __device__ __forceinline__ void begin(Place<Tile<kTileRows, kMostColumns>>, int d, int warp,
                                        int lane, const char*, std::uint64_t, const RowOf& row_of) {
#pragma unroll
    for (int pass = 0; pass < kWarpRows / 4; ++pass) {
      const char* const row = row_of(kWarpRows * warp + 4 * pass + lane / 8);
#pragma unroll
      for (int chunk = 0; chunk < kMostColumns / 64; ++chunk) {
        loaded[pass][chunk] = make_uint2(0, 0);
        if (row == nullptr || 64 * chunk >= d) continue;
        loaded[pass][chunk] =
            __ldg(reinterpret_cast<const uint2*>(row + 64 * chunk + lane % 8 * 8));
      }
    }
  }
  __device__ __forceinline__ void finish(Place<Tile<kTileRows, kMostColumns>> slot, int d, int warp,
                                         int lane) {
#pragma unroll
    for (int pass = 0; pass < kWarpRows / 4; ++pass) {
#pragma unroll
      for (int chunk = 0; chunk < kMostColumns / 64; ++chunk) {
        if (64 * chunk >= d) break;
        const uint2 low = widen<kInto>(loaded[pass][chunk].x);
        const uint2 high = widen<kInto>(loaded[pass][chunk].y);
        const int local = kWarpRows * warp + 4 * pass + lane / 8;
        st_shared(slot.unit(local, 8 * chunk + lane % 8), make_uint4(low.x, low.y, high.x, high.y));
      }
    }
  }
  __device__ __forceinline__ void wait() {}
};

}  // namespace winnow::indexer::cuda_detail
