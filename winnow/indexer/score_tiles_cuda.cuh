// Scores of the lightning indexer for GPUs of compute capability 8.0 and newer: a block of eight
// warps scores tiles of 128 key rows for the queries of an item.
//
// The heads of an item's queries are its columns, in parts of 16: a query has as many parts as
// hold its heads, and the rest of the last one is zeros. A warp keeps 32 columns in registers, as
// fragments (64 registers), so that shared memory is read for the keys alone. With up to 64 or 128
// columns several warps have the same ones, and share out the rows. The products of 32 rows with
// them (32 registers) go through ReLU, weights and the sum over the heads of a part, where they
// are; the sums of parts meet in shared memory, and what the operation does with a score follows.
//
// f8_e4m3 becomes f16 on the way to shared memory, exactly. Rows of 64 numbers take half a tile.
//
//   rows  --copies-->  tiles (two)  --products, sums-->  sums (two)  --store()-->
//
// with one barrier for a tile: while it is multiplied the next one is on its way, and the sums of
// the one before are stored.
//
// Whatever a score is wanted for, its sums have the same order, and so the same bits.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include <cuda_bf16.h>

#include "winnow/core/dtype.h"
#include "winnow/device/common/math.cuh"
#include "winnow/device/common/matrix.cuh"
#include "winnow/device/common/places.cuh"
#include "winnow/device/common/shared.cuh"
#include "winnow/device/common/warp.cuh"
#include "winnow/device/sm80/mma.cuh"
#include "winnow/device/sm80/tile.cuh"
#include "winnow/indexer/copy_rows_cuda.cuh"

namespace winnow::indexer::cuda_detail {

using namespace winnow::device;

inline constexpr int kTileRows = 128;
inline constexpr int kPartHeads = 16;
inline constexpr int kWarpParts = 2;  // of a warp: 32 columns
inline constexpr int kParts = kWarpParts * kWarps;
inline constexpr int kUnitRows = 32;                  // of a warp at a time
inline constexpr int kWarpRows = kTileRows / kWarps;  // that a warp copies
inline constexpr int kSumStride = kTileRows + 8;      // a warp's stores meet no bank twice

using RowTile = Tile<kTileRows, kMostColumns>;
using PartSums = float[kParts][kSumStride];

struct Memory {
  RowTile rows[2];
  PartSums sums[2];
};
struct Plan : Shared<Memory> {
  static constexpr int kBytes = sizeof(Memory);
  static_assert(kBytes <= 99 * 1024);
  WINNOW_PLACE(rows)
  WINNOW_PLACE(sums)
};

// How the columns of an item are shared out.
struct Columns {
  int warps;    // that have different columns: 2, 4 or 8
  int parts;    // of a query
  int queries;  // of an item
};
// As few warps as hold the columns of all queries, and fewer where there is room for the results of
// `most` queries of an item alone.
inline Columns columns_for(std::int64_t heads, std::int64_t queries, std::int64_t most) {
  const int parts = static_cast<int>((heads + kPartHeads - 1) / kPartHeads);
  int warps = 2;
  while (warps < kWarps) {
    const int held = kWarpParts * warps / parts;
    const int next = kWarpParts * 2 * warps / parts;
    if (held > 0 && (queries <= held || std::min<std::int64_t>(queries, next) > most)) break;
    warps *= 2;
  }
  return {warps, parts, kWarpParts * warps / parts};
}

// ---- Heads -------------------------------------------------------------------------------------

// The queries of an item. Strides of q count bytes.
struct HeadsView {
  const char* q;  // of the first head of the first query
  std::int64_t query_stride, head_stride;
  const void* weights;  // of the first query, f32 or bf16
  std::int64_t weights_stride;
  int queries, heads, d;
  bool weights_are_bf16;
};

// The first query of a view some queries further.
__host__ __device__ inline HeadsView from_query(HeadsView view, std::int64_t query) {
  view.q += query * view.query_stride;
  view.weights = static_cast<const char*>(view.weights) +
                 query * view.weights_stride * (view.weights_are_bf16 ? 2 : 4);
  return view;
}

// The columns of a warp as the lane has them: blocks of 8 heads, two for a part. kDType: of q.
template <DType kDType>
struct Heads {
  std::uint32_t fragments[2 * kWarpParts][kMostColumns / 16][2];
  float weight[2 * kWarpParts][2];
  unsigned counts;  // bit 2 n + e: there is such a head

  __device__ __forceinline__ void load(const HeadsView& view, const Columns& columns,
                                       int column_warp, int lane) {
    counts = 0;
#pragma unroll
    for (int n = 0; n < 2 * kWarpParts; ++n) {
      const int part = column_warp * kWarpParts + n / 2;
      const int query = part / columns.parts;
      const int first = part % columns.parts * kPartHeads + n % 2 * 8;
      const bool exists = query < view.queries && first + lane / 4 < view.heads;
      const char* const from =
          view.q + (exists ? query * view.query_stride + (first + lane / 4) * view.head_stride : 0);
#pragma unroll
      for (int step = 0; step < kMostColumns / 16; ++step) {
        const int column = 16 * step + lane % 4 * 2;
        load_pairs(from, column, exists && column < view.d, fragments[n][step]);
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int head = first + lane % 4 * 2 + e;
        weight[n][e] = 0.0f;
        if (query >= view.queries || head >= view.heads) continue;
        counts |= 1u << (2 * n + e);
        const std::int64_t at = query * view.weights_stride + head;
        weight[n][e] = view.weights_are_bf16
                           ? __bfloat162float(static_cast<const __nv_bfloat16*>(view.weights)[at])
                           : __ldg(static_cast<const float*>(view.weights) + at);
      }
    }
  }

 private:
  // Columns `column` and the next one, and those 8 further.
  __device__ static void load_pairs(const char* head, int column, bool exists,
                                    std::uint32_t (&pairs)[2]) {
    if constexpr (kDType == DType::f8_e4m3) {
      std::uint32_t four = 0;
      if (exists) {
        const auto* const at = reinterpret_cast<const std::uint16_t*>(head + column);
        four = __ldg(at) | static_cast<std::uint32_t>(__ldg(at + 4)) << 16;
      }
      const uint2 wide = widen_f8(four);
      pairs[0] = wide.x, pairs[1] = wide.y;
    } else {
      const auto* const at = reinterpret_cast<const std::uint32_t*>(head + 2 * column);
      pairs[0] = exists ? __ldg(at) : 0u;
      pairs[1] = exists ? __ldg(at + 4) : 0u;
    }
  }
};

// ---- Products and sums -------------------------------------------------------------------------

template <DType kDType>
inline constexpr DType kProductType = kDType == DType::f8_e4m3 ? DType::f16 : kDType;

// dots[m][n]: 16 rows and 8 heads.
using Dots = float[kUnitRows / 16][2 * kWarpParts][4];

template <DType kDType>
__device__ __forceinline__ void multiply_unit(Squares<RowTile::kChunkBytes> rows, int unit, int d,
                                              const Heads<kDType>& heads, Dots& dots) {
  rows.lane += unit * kUnitRows * kTileLine;
#pragma unroll
  for (int step = 0; step < kMostColumns / 16; ++step) {
    if (step == 4 && d <= 64) break;
    std::uint32_t a[kUnitRows / 16][4];
#pragma unroll
    for (int m = 0; m < kUnitRows / 16; ++m) {
      ldmatrix_x4(rows.at(m, step), a[m][0], a[m][1], a[m][2], a[m][3]);
    }
#pragma unroll
    for (int n = 0; n < 2 * kWarpParts; ++n) {
#pragma unroll
      for (int m = 0; m < kUnitRows / 16; ++m) {
        mma_m16n8k16<kProductType<kDType>>(dots[m][n], a[m], heads.fragments[n][step][0],
                                           heads.fragments[n][step][1]);
      }
    }
  }
}

// The weighted sums of a unit over the heads of each part, to shared memory. A lane has two heads
// of 8; the four of a quad share the sums of their rows out.
template <bool kMasked, DType kDType>
__device__ __forceinline__ void sum_unit(Place<float[kSumStride]> first_part, int unit, int lane,
                                         const Heads<kDType>& heads, const Dots& dots) {
  float sum[kWarpParts][4];  // rows 16 m + 8 r of [2 m + r]
#pragma unroll
  for (int part = 0; part < kWarpParts; ++part) {
#pragma unroll
    for (int row = 0; row < 4; ++row) {
      float total = 0.0f;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int n = 2 * part + i / 2, e = i % 2;
        const float next = fmaf(heads.weight[n][e], relu(dots[row / 2][n][row % 2 * 2 + e]), total);
        // What stands in for a head counts nothing, also where a key holds infinities.
        total = !kMasked || (heads.counts >> (2 * n + e) & 1) ? next : total;
      }
      sum[part][row] = total;
    }
  }
  // Lanes two apart share out the parts, neighbours the halves of the rows.
  const bool upper = lane & 2, odd = lane & 1;
  float mine[4];
#pragma unroll
  for (int row = 0; row < 4; ++row) {
    const float give = upper ? sum[0][row] : sum[1][row];
    const float keep = upper ? sum[1][row] : sum[0][row];
    mine[row] = keep + __shfl_xor_sync(kFullWarp, give, 2);
  }
  const Place<float[kSumStride]> to{
      first_part.address + (upper ? static_cast<std::uint32_t>(sizeof(float[kSumStride])) : 0u)};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float give = odd ? mine[r] : mine[2 + r];
    const float keep = odd ? mine[2 + r] : mine[r];
    const float total = keep + __shfl_xor_sync(kFullWarp, give, 1);
    to[unit * kUnitRows + (odd ? 16 : 0) + 8 * r + lane / 4].store(total);
  }
}

// The sums of a tile, for store().
struct TileSums {
  Place<PartSums> sums;
  int parts;  // of a query

  // Of rows 4 lane + {0, 1, 2, 3}, over the heads of a query.
  __device__ __forceinline__ void load(int query, int lane, float (&score)[4]) const {
#pragma unroll 1
    for (int part = 0; part < parts; ++part) {
      const uint4 four = ld_shared_words(sums[query * parts + part][4 * lane].address);
      const float values[4] = {__uint_as_float(four.x), __uint_as_float(four.y),
                               __uint_as_float(four.z), __uint_as_float(four.w)};
#pragma unroll
      for (int e = 0; e < 4; ++e) score[e] = part == 0 ? values[e] : score[e] + values[e];
    }
  }
};

// Scores the tiles of an item. `Work` has
//   tiles()                       at least one
//   heads()                       a HeadsView
//   prepare(tile, warp, lane)     before row(local), which all lanes call together
//   row(local)                    see Copies
//   store(tile, sums, warp, lane) takes the sums of a tile, by all warps
template <DType kDType, class Work>
__device__ __forceinline__ void score_tiles(Plan shared, const Columns& columns, Work& work) {
  const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int column_warp = warp % columns.warps;
  const int row_warp = warp / columns.warps, row_warps = kWarps / columns.warps;
  const HeadsView view = work.heads();
  const int d = view.d, tiles = work.tiles();
  const bool masked = view.heads % kPartHeads != 0;
  const std::uint64_t policy = policy_evict_last();

  Copies<kDType, kProductType<kDType>, kTileRows> copies;
  const auto begin = [&](int tile) {
    work.prepare(tile, warp, lane);
    copies.begin(shared.rows()[tile & 1], d, warp, lane, view.q, policy,
                 [&](int local) { return work.row(local); });
  };
  begin(0);
  Heads<kDType> heads;
  heads.load(view, columns, column_warp, lane);
  copies.finish(shared.rows()[0], d, warp, lane);
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    copies.wait();
    __syncthreads();  // the tile is there, and the sums of the one before
    const bool more = tile + 1 < tiles;
    if (more) begin(tile + 1);
    if (tile > 0) {
      work.store(tile - 1, TileSums{shared.sums()[(tile - 1) & 1], columns.parts}, warp, lane);
    }
    const auto rows = shared.rows()[tile & 1].squares(lane);
    const auto sums = shared.sums()[tile & 1][kWarpParts * column_warp];
#pragma unroll 1
    for (int unit = row_warp; unit < kTileRows / kUnitRows; unit += row_warps) {
      Dots dots = {};
      multiply_unit(rows, unit, d, heads, dots);
      if (masked) {
        sum_unit<true>(sums, unit, lane, heads, dots);
      } else {
        sum_unit<false>(sums, unit, lane, heads, dots);
      }
    }
    if (more) copies.finish(shared.rows()[(tile + 1) & 1], d, warp, lane);
  }
  __syncthreads();  // the last sums are there
  work.store(tiles - 1, TileSums{shared.sums()[(tiles - 1) & 1], columns.parts}, warp, lane);
}

// The shared memory of a kernel's block.
__device__ __forceinline__ Plan plan() { return {shared_address(dynamic_shared<128>())}; }

// Part `split` of `splits` of a number of tiles: [first, end).
struct TileRange {
  int first, end;
};
__device__ __forceinline__ TileRange split_tiles(int tiles, int split, int splits) {
  return {static_cast<int>(std::int64_t{tiles} * split / splits),
          static_cast<int>(std::int64_t{tiles} * (split + 1) / splits)};
}
// In how many parts the tiles of each of `items` are cut: so that every multiprocessor has two
// blocks, where they have four tiles.
inline std::int64_t splits_for(std::int64_t items, std::int64_t tiles, int multiprocessors) {
  return std::clamp<std::int64_t>(2 * multiprocessors / items, 1,
                                  std::max<std::int64_t>(tiles / 4, 1));
}

}  // namespace winnow::indexer::cuda_detail
