// Backward of the indexer, for GPUs of compute capability 8.0 and newer: the products.
//
// A block of eight warps has one item, a query and 64 of its heads, and passes through the query's
// entries in tiles of 64. Q stays in shared memory and, for the products with keys, in registers,
// as do the sums of dq. For a tile
//
//   warp w  S = Q K^T of 16 heads and 32 entries; d_dot = d_scores * weights where S > 0, to shared
//           memory; dq += d_dot K over its entries; d_weights
//   warp w  sums = d_dot^T Q of 16 entries and 64 columns; the sums pass through shared memory,
//           so that a warp adds 128 contiguous bytes to a row of dk
//
// with a barrier behind each line, while the rows of the next tile are on their way. In the end the
// two warps that have the same heads add up their dq and d_weights.
//
// f8_e4m3 becomes bf16, exactly. d_dot is rounded to the type of the products. In f16 it could
// leave the range of the type, and is multiplied with a power of two for each item, which takes the
// largest of it to between 2^13 and 2^15.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_fp16.h>

#include "winnow/device/common/math.cuh"
#include "winnow/device/common/matrix.cuh"
#include "winnow/device/common/memory.cuh"
#include "winnow/device/common/places.cuh"
#include "winnow/device/common/shared.cuh"
#include "winnow/device/common/warp.cuh"
#include "winnow/device/sm80/mma.cuh"
#include "winnow/device/sm80/tile.cuh"
#include "winnow/indexer/backward/backward_sums.cuh"
#include "winnow/indexer/copy_rows_cuda.cuh"

namespace winnow::indexer::backward_cuda_detail {

using namespace cuda_detail;
using namespace gpu;

static_assert(kBlockHeads == kTileEntries);
using RowTile = Tile<kTileEntries, kMostColumns>;
inline constexpr int kWarpEntries = kTileEntries / kWarps;  // that a warp copies
inline constexpr int kHeadWarps = 4;                        // with 16 heads, or entries, each
// Floats of a row that passes through shared memory: stores of pairs meet no bank twice.
inline constexpr int kSumStride = 64 + 8, kSharedStride = kMostColumns + 8;

struct Memory {
  RowTile rows[2];
  RowTile q;
  Tile<kBlockHeads, kTileEntries> d_dot;
  union {
    alignas(16) float sums[kWarps][16][kSumStride];
    float dq[kBlockHeads][kSharedStride];  // of the last four warps, in the end
  };
  float d_scores[2][kTileEntries];        // 0 where absent
  std::int32_t targets[2][kTileEntries];  // rows of dk; -1 where absent
  float d_weights[kBlockHeads];           // of the last four warps, in the end
  float largest[kWarps];                  // in f16: of d_scores
};
struct Plan : Shared<Memory> {
  static constexpr int kBytes = sizeof(Memory);
  static_assert(kBytes <= 99 * 1024);
  WINNOW_PLACE(rows)
  WINNOW_PLACE(q)
  WINNOW_PLACE(d_dot)
  WINNOW_PLACE(sums)
  WINNOW_PLACE(dq)
  WINNOW_PLACE(d_scores)
  WINNOW_PLACE(targets)
  WINNOW_PLACE(d_weights)
  WINNOW_PLACE(largest)
};

template <DType kDType>
inline constexpr DType kProductType = kDType == DType::f8_e4m3 ? DType::bf16 : kDType;

template <DType kDType>
struct NumberOf {
  __device__ static float of(const View&, const char* row, int column) {
    if constexpr (kDType == DType::f8_e4m3) {
      return unpack_f16(widen_f8(static_cast<std::uint8_t>(row[column])).x).x;
    } else if constexpr (kDType == DType::f16) {
      return __half2float(reinterpret_cast<const __half*>(row)[column]);
    } else {
      return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(row)[column]);
    }
  }
};

// What a lane knows of its two heads, 8 apart.
struct OwnHeads {
  float weight[2], d_weight[2];
};

// The sums of dq of a warp: 16 heads, blocks of 8 columns.
using Sums = float[kMostColumns / 8][4];

// ---- The range of f16 --------------------------------------------------------------------------

// x if that is finite, else 0.
__device__ __forceinline__ float finite(float x) { return fabsf(x) < infinity() ? x : 0.0f; }

// The power of two by which d_dot of an item is multiplied. All threads of the block call it, once:
// a second call would need a barrier before it writes `largest`.
__device__ __forceinline__ float scale_of_item(const Params& p, const Entries& entries,
                                               int first_head, Plan shared, int warp, int lane) {
  float d_score = 0.0f, weight = 0.0f;
  const float* const d_scores = p.d_scores + entries.query * p.d_scores_stride + entries.first;
  for (int entry = static_cast<int>(threadIdx.x); entry < entries.entries; entry += kThreads) {
    if (entries.row(index_of_entry(p.view, entries, entry)) < 0) continue;
    d_score = fmaxf(d_score, fabsf(finite(__ldg(d_scores + entry))));
  }
  d_score = warp_max(d_score);
  if (lane == 0) shared.largest()[warp].store(d_score);
#pragma unroll
  for (int head = lane; head < kBlockHeads; head += 32) {
    if (first_head + head >= p.view.h) continue;
    weight = fmaxf(weight, fabsf(finite(weight_of(p.view, entries.query, first_head + head))));
  }
  weight = warp_max(weight);
  __syncthreads();  // the largest of all warps are there
  d_score = warp_max(lane < kWarps ? shared.largest()[lane].load() : 0.0f);
  if (d_score == 0.0f || weight == 0.0f) return 1.0f;
  int one, other;  // d_score < 2^one, weight < 2^other
  frexpf(d_score, &one);
  frexpf(weight, &other);
  return ldexpf(1.0f, max(-126, min(15 - one - other, 126)));
}

// ---- A tile ------------------------------------------------------------------------------------

// Computes d_dot of the warp's 16 heads and 32 entries, for registers and shared memory, in the
// type of the products, and adds to d_weights.
template <DType kType>
__device__ __forceinline__ void weigh(Plan shared, int slot, int first_entry, int first_head,
                                      int lane, float scale, const float (&s)[4][4],
                                      OwnHeads& heads, std::uint32_t (&d_dot)[4][2]) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int entry = first_entry + 8 * n + lane % 4 * 2;
    float d_score[2];
    bool there[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      d_score[e] = shared.d_scores()[slot][entry + e].load();
      there[e] = shared.targets()[slot][entry + e].load() >= 0;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float value[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float dot = s[n][2 * r + e];
        // Absent entries count nothing, whatever Q holds.
        const float sum = fmaf(d_score[e], relu(dot), heads.d_weight[r]);
        if (there[e]) heads.d_weight[r] = sum;
        value[e] = there[e] && dot > 0.0f ? d_score[e] * heads.weight[r] : 0.0f;
        if constexpr (kType == DType::f16) value[e] *= scale;
      }
      d_dot[n][r] = pack_pair<kType>(value[0], value[1]);
      st_shared(shared.d_dot().pair(first_head + lane / 4 + 8 * r, entry), d_dot[n][r]);
    }
  }
}

// The warp's sums of a tile, 16 entries and 64 columns from `column` on, to dk.
template <class Add>
__device__ __forceinline__ void add_rows(Place<float[16][kSumStride]> sums,
                                         Place<std::int32_t[kTileEntries]> targets, int first_entry,
                                         int lane, const float (&d)[8][4], const Add& add) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const std::uint64_t pair =
          std::uint64_t{__float_as_uint(d[n][2 * r + 1])} << 32 | __float_as_uint(d[n][2 * r]);
      st_shared(sums[lane / 4 + 8 * r][8 * n + lane % 4 * 2].address, pair);
    }
  }
  __syncwarp();  // the warp's sums are there
#pragma unroll 4
  for (int i = 0; i < 16; ++i) {
    const int target = targets[first_entry + i].load();
    if (target < 0) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      add(target, 32 * half + lane, sums[i][32 * half + lane].load());
    }
  }
}

// ---- The item ----------------------------------------------------------------------------------

// Stores dq and d_weights of the first four warps' heads.
template <DType kType>
__device__ __forceinline__ void store_item(const Params& p, std::int64_t query, int first_head,
                                           int d, int lane, const OwnHeads& heads, const Sums& dq) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int head = first_head + lane / 4 + 8 * r;
    const bool exists = head < p.view.h;
    if (exists && lane % 4 == 0) {
      const std::int64_t at = query * p.d_weights_stride + head;
      if (p.d_weights_f32) {
        reinterpret_cast<float*>(p.d_weights)[at] = heads.d_weight[r];
      } else {
        reinterpret_cast<__nv_bfloat16*>(p.d_weights)[at] = __float2bfloat16_rn(heads.d_weight[r]);
      }
    }
    const std::int64_t at = query * p.dq_stride0 + head * p.dq_stride1;
#pragma unroll
    for (int part = 0; part < kMostColumns / 32; ++part) {
      if (32 * part >= d) break;
      if (p.dq_f32) {
        if (!exists) continue;
        float* const to = reinterpret_cast<float*>(p.dq) + at + 32 * part + lane % 4 * 2;
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          const auto& sums = dq[4 * part + b];
          *reinterpret_cast<float2*>(to + 8 * b) = make_float2(sums[2 * r], sums[2 * r + 1]);
        }
        continue;
      }
      // A quad holds 32 columns as 4 blocks of 8, two columns a lane; transposed, each lane has one
      // block, 16 bytes.
      std::uint32_t w[4];
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const auto& sums = dq[4 * part + b];
        w[b] = pack_pair<kType>(sums[2 * r], sums[2 * r + 1]);
      }
      quad_transpose(w, lane);
      if (exists) {
        store_streaming(p.dq + 2 * (at + 32 * part + 8 * (lane % 4)), w[0], w[1], w[2], w[3]);
      }
    }
  }
}

template <DType kDType>
__global__ void __launch_bounds__(kThreads, 1) backward_kernel(const __grid_constant__ Params p) {
  constexpr DType kType = kProductType<kDType>;
  const Plan shared{shared_address(dynamic_shared<128>())};
  const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const View& view = p.view;
  const int d = view.row_bytes / (kDType == DType::f8_e4m3 ? 1 : 2);
  Entries entries = entries_of(view, static_cast<int>(blockIdx.x / p.head_blocks));
  if (entries.begin == entries.end) entries.entries = 0;
  const int block_head = static_cast<int>(blockIdx.x % p.head_blocks) * kBlockHeads;
  const int tiles = entries.tiles();
  // What the warp computes: for S and dq 16 heads and half of the entries, for the sums of dk 16
  // entries and 64 columns.
  const int own16 = warp % kHeadWarps * 16, own_half = warp / kHeadWarps;
  const std::uint64_t keep = policy_evict_normal(), once = policy_evict_first();

  OwnHeads heads{};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int head = block_head + own16 + lane / 4 + 8 * r;
    heads.weight[r] = head < view.h ? weight_of(view, entries.query, head) : 0.0f;
  }
  float scale = 1.0f;
  if constexpr (kType == DType::f16) {
    scale = scale_of_item(p, entries, block_head, shared, warp, lane);
  }

  // Each lane below kWarpEntries holds the index and the d_score of one entry of the next tile.
  int index = -1;
  float d_score = 0.0f;
  const auto load_entry = [&](int tile) {
    const int entry = tile * kTileEntries + kWarpEntries * warp + lane;
    index = -1;
    if (lane >= kWarpEntries || entry >= entries.entries) return;
    index = index_of_entry(view, entries, entry);
    d_score = __ldg(p.d_scores + entries.query * p.d_scores_stride + entries.first + entry);
  };
  Copies<kDType, kType, kTileEntries> copies;
  const auto begin = [&](int tile) {
    const int row = entries.row(index), slot = tile & 1;
    if (lane < kWarpEntries) {
      const int local = kWarpEntries * warp + lane;
      float value = row < 0 ? 0.0f : d_score;
      if (kDType == DType::f8_e4m3 && row >= 0) value *= scale_of(view, row);
      shared.d_scores()[slot][local].store(value);
      shared.targets()[slot][local].store(row);
    }
    copies.begin(shared.rows()[slot], d, warp, lane, view.q, keep, [&](int local) {
      const std::int64_t named = __shfl_sync(kFullWarp, row, local % kWarpEntries);
      return named < 0 ? nullptr : view.k + named * view.k_row_stride;
    });
    load_entry(tile + 1);
  };
  load_entry(0);
  if (tiles > 0) {
    const char* const q = view.q + entries.query * view.q_stride0;
    copies.begin(shared.q(), d, warp, lane, view.q, once, [&](int local) {
      const std::int64_t head = block_head + local;
      return head < view.h ? q + head * view.q_stride1 : nullptr;
    });
    copies.finish(shared.q(), d, warp, lane);
    begin(0);
    copies.finish(shared.rows()[0], d, warp, lane);
  }

  Sums dq = {};
  std::uint32_t q[kMostColumns / 16][4];
  const auto q_squares = shared.q().squares(lane), d_dot_squares = shared.d_dot().squares(lane);
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    const int slot = tile & 1;
    const bool more = tile + 1 < tiles;
    copies.wait();
    __syncthreads();  // the tile is there, and the one before is done with
    if (more) begin(tile + 1);
    const auto rows = shared.rows()[slot].squares(lane);
    if (tile == 0) {
#pragma unroll
      for (int step = 0; step < kMostColumns / 16; ++step) {
        if (step == 4 && d <= 64) break;
        ldmatrix_x4(q_squares.at(own16 / 16, step), q[step][0], q[step][1], q[step][2], q[step][3]);
      }
    }
    std::uint32_t d_dot[4][2];
    {
      float s[4][4] = {};
#pragma unroll
      for (int step = 0; step < kMostColumns / 16; ++step) {
        if (step == 4 && d <= 64) break;
#pragma unroll
        for (int n16 = 0; n16 < 2; ++n16) {
          std::uint32_t b[4];
          ldmatrix_x4(rows.at(2 * own_half + n16, step), b[0], b[2], b[1], b[3]);
          mma_m16n8k16<kType>(s[2 * n16], q[step], b[0], b[1]);
          mma_m16n8k16<kType>(s[2 * n16 + 1], q[step], b[2], b[3]);
        }
      }
      weigh<kType>(shared, slot, 32 * own_half, own16, lane, scale, s, heads, d_dot);
    }
#pragma unroll
    for (int k16 = 0; k16 < 2; ++k16) {
      const std::uint32_t a[4] = {d_dot[2 * k16][0], d_dot[2 * k16][1], d_dot[2 * k16 + 1][0],
                                  d_dot[2 * k16 + 1][1]};
#pragma unroll
      for (int n16 = 0; n16 < kMostColumns / 16; ++n16) {
        if (n16 == 4 && d <= 64) break;
        std::uint32_t b[4];
        ldmatrix_x4_trans(rows.at(2 * own_half + k16, n16), b[0], b[1], b[2], b[3]);
        mma_m16n8k16<kType>(dq[2 * n16], a, b[0], b[1]);
        mma_m16n8k16<kType>(dq[2 * n16 + 1], a, b[2], b[3]);
      }
    }
    __syncthreads();  // d_dot of all warps is there
    const int column = 64 * own_half;
    if (column < d) {
      float sums[8][4] = {};
#pragma unroll
      for (int k16 = 0; k16 < kBlockHeads / 16; ++k16) {
        std::uint32_t a[4];
        ldmatrix_x4_trans(d_dot_squares.at(k16, own16 / 16), a[0], a[2], a[1], a[3]);
#pragma unroll
        for (int n16 = 0; n16 < 4; ++n16) {
          std::uint32_t b[4];
          ldmatrix_x4_trans(q_squares.at(k16, n16) + own_half * RowTile::kChunkBytes, b[0], b[1],
                            b[2], b[3]);
          mma_m16n8k16<kType>(sums[2 * n16], a, b[0], b[1]);
          mma_m16n8k16<kType>(sums[2 * n16 + 1], a, b[2], b[3]);
        }
      }
      const auto targets = shared.targets()[slot];
      const auto through = shared.sums()[warp];
      const float unit = 1.0f / scale;  // exact: a power of two
      if (p.fixed == nullptr) {
        add_rows(through, targets, own16, lane, sums, [&](std::int64_t target, int at, float x) {
          if constexpr (kType == DType::f16) x *= unit;
          reduce_add(p.dk + target * p.dk_stride + column + at, x);
        });
      } else {
        add_rows(through, targets, own16, lane, sums, [&](std::int64_t target, int at, float x) {
          if constexpr (kType == DType::f16) x *= unit;
          reduce_add(p.fixed + target * d + column + at,
                     static_cast<unsigned long long>(__float2ll_rn(x * __ldg(p.scales + target))));
        });
      }
    }
    if (more) copies.finish(shared.rows()[slot ^ 1], d, warp, lane);
  }

  if constexpr (kType == DType::f16) {
#pragma unroll
    for (int n = 0; n < kMostColumns / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) dq[n][i] *= 1.0f / scale;
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) heads.d_weight[r] = quad_sum(heads.d_weight[r]);
  __syncthreads();  // the sums of dk are done with
  const auto mine = [&](int r, int n) {
    return shared.dq()[own16 + lane / 4 + 8 * r][8 * n + lane % 4 * 2];
  };
  if (own_half == 1) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (lane % 4 == 0) {
        shared.d_weights()[own16 + lane / 4 + 8 * r].store(heads.d_weight[r]);
      }
#pragma unroll
      for (int n = 0; n < kMostColumns / 8; ++n) {
        st_shared(mine(r, n).address, std::uint64_t{__float_as_uint(dq[n][2 * r + 1])} << 32 |
                                          __float_as_uint(dq[n][2 * r]));
      }
    }
  }
  __syncthreads();  // dq of the other entries is there
  if (own_half == 1) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    heads.d_weight[r] += shared.d_weights()[own16 + lane / 4 + 8 * r].load();
#pragma unroll
    for (int n = 0; n < kMostColumns / 8; ++n) {
      dq[n][2 * r] += mine(r, n).load();
      dq[n][2 * r + 1] += (mine(r, n) + 1).load();
    }
  }
  store_item<kType>(p, entries.query, block_head + own16, d, lane, heads, dq);
}

}  // namespace winnow::indexer::backward_cuda_detail
