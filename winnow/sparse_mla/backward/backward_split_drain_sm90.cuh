// Backward of top-k sparse MLA attention, sm90, for many heads: how the dkv kernel
// (backward_split_products_sm90.cuh) adds the sums of a tile, 64 entries x a slice of the columns,
// to the rows of dkv. Two ways, which look alike to it:
//
//   FloatDrain  f32 reductions, in whatever order they come
//   FixedDrain  integer reductions, whose sum has no order: the deterministic mode
//
// begin() before the products, locate() after them, then add() for each 32 columns. A warp has 16
// entries, as the accumulators of wgmma hold them (device/sm90/wgmma.cuh). What counts for the
// speed is that an instruction adds to 128 contiguous bytes of a row: 64 cost a fifth.
#pragma once

#include <cstdint>

#include "winnow/sparse_mla/backward/backward_split_sm90.cuh"

namespace winnow::sparse_mla::backward_split_detail {

// ---- f32 ---------------------------------------------------------------------------------------

// The four sums of columns 4 c to 4 c + 3 (of 16) that lane c' of a quad takes for row r, c' = 0,
// 2, 1, 3; v is what the accumulators of two neighbouring j hold (device/sm90/wgmma.cuh). Lanes
// pair up: the even one gets four columns of the first j, the odd one four of the second.
__device__ __forceinline__ float4 four_columns(const float* v, int r, int lane) {
  const bool odd = lane & 1;
  const float a0 = v[2 * r], a1 = v[2 * r + 1], b0 = v[4 + 2 * r], b1 = v[4 + 2 * r + 1];
  const float got0 = __shfl_xor_sync(kFullWarp, odd ? a0 : b0, 1);
  const float got1 = __shfl_xor_sync(kFullWarp, odd ? a1 : b1, 1);
  return {odd ? got0 : a0, odd ? got1 : a1, odd ? b0 : got0, odd ? b1 : got1};
}

// Sums of a tile into f32: eight lanes to 128 bytes of a row. Quads of neighbouring rows pair up:
// first both add to the upper row, each half of 32 columns, then to the lower one.
struct FloatDrain {
  std::uint64_t policy = policy_evict_last();
  std::int32_t index[2][2];
  float* to[2][2];  // [r][i]: row i of the pair, 8 r further; where the lane adds in it

  // Starts to load the numbers of the rows: they are on their way during the products.
  __device__ __forceinline__ void begin(const Params& p, int query, int tile, int entries, int warp,
                                        int lane) {
    const std::int32_t* list = p.rows.indices + query * p.rows.indices_stride;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int entry = tile * kTileRows + 16 * warp + lane / 8 * 2 + 8 * (i / 2) + i % 2;
      index[i / 2][i % 2] = entry < entries ? __ldg(list + entry) : -1;
    }
  }

  __device__ __forceinline__ void locate(const Params& p, int first_column, int lane) {
    const int column = first_column + 2 * (lane & 2) + 8 * (lane & 1) + 4 * (lane & 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::int64_t row = index[i / 2][i % 2];
      to[i / 2][i % 2] = row < 0 ? nullptr : p.dkv + row * p.dkv_stride + column;
    }
  }

  // Adds 32 columns from `column` of the slice on; v: accumulators of four neighbouring j.
  __device__ __forceinline__ void add(int column, int lane, const float* v) const {
    const bool lower = lane & 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float4 first = four_columns(v, r, lane), second = four_columns(v + 8, r, lane);
      const float4 give = lower ? first : second, keep = lower ? second : first;
      const float4 got = {
          __shfl_xor_sync(kFullWarp, give.x, 4), __shfl_xor_sync(kFullWarp, give.y, 4),
          __shfl_xor_sync(kFullWarp, give.z, 4), __shfl_xor_sync(kFullWarp, give.w, 4)};
      const float4 a = lower ? got : keep, b = lower ? keep : got;
      if (to[r][0] != nullptr) reduce_add(to[r][0] + column, a, policy);
      if (to[r][1] != nullptr) reduce_add(to[r][1] + column, b, policy);
    }
  }
};

// ---- Fixed point -------------------------------------------------------------------------------
//
// The deterministic mode adds integers, whose sum has no order. Before the tiles of a chunk of
// queries are added, each row that they chose has a power of two as scale, such that neither its
// addends nor its sum can become too large. An addend is a sum over heads of P d_out + dS q: the
// norms of P and dS over the heads bound it, times those of d_out and q (Hoelder); `scores` leaves
// the largest ones of 16 heads at a time. A row keeps its scale from chunk to chunk while there is
// room, else its sum goes over into f32 first; in the end all do.
// Most units: of an addend, so that the rounder keeps its exponent, and of a sum.
inline constexpr float kMostOfAddend = 4194304.0f;  // 2^22
inline constexpr float kMostOfSum = 2147479552.0f;  // 2^31 - 2^12
// A new scale leaves room for larger addends, and for the sums of some more chunks, if there are.
inline constexpr int kAddendBits = 21, kSumBits = 28, kOneSumBits = 30;

// One block a query, one warp a tile: the bound of its addends into its rows.
inline constexpr int kBoundThreads = 1024;
static __global__ void __launch_bounds__(kBoundThreads)
    bound_kernel(const __grid_constant__ Params p) {
  const int query = blockIdx.x, lane = threadIdx.x % 32;
  const int entries = query_entries(p.rows, query);
  const std::int32_t* list = p.rows.indices + query * p.rows.indices_stride;
  for (int tile = threadIdx.x / 32; tile < tile_count(entries); tile += kBoundThreads / 32) {
    const TileEntries loaded = load_tile(list, tile, entries, lane);
    float bound = 0;
    for (int part = lane; part < 4 * p.blocks; part += 32) {  // a warp of scores: 16 heads
      const float* head =
          p.head_norms + (static_cast<std::int64_t>(query) * 4 * p.blocks + part) * 2;
      const float* norm = tile_norm(p, query, tile, part / 4, part % 4);
      bound += norm[0] * head[1] + norm[1] * head[0];
    }
    const std::uint32_t bits = __float_as_uint(fabsf(warp_sum(bound)));  // NaN is largest
    for (const std::int32_t row : {loaded.low, loaded.high}) {
      if (row < 0) continue;
      // Most of them are below what others left, and need not wait for each other.
      if (bits > ld_relaxed_gpu(p.row_bounds + row)) atomicMax(p.row_bounds + row, bits);
      atomicAdd(p.row_counts + row, 1u);
    }
  }
}

// Adds a row's integers to its f32 sums, which hold nothing yet where a row of the only chunk has
// ended; a warp. The integers become zeros unless the row has ended.
template <bool kEnded>
__device__ __forceinline__ void fold_row(const Params& p, std::int64_t row, const RowState& state,
                                         int lane) {
  const float unit = 1.0f / state.scale;  // exact: a power of two
  const std::uint64_t taken_off =
      state.addends * (std::uint64_t{kRounderBits} << 32 | kRounderBits);
  auto* const from = reinterpret_cast<ulonglong2*>(p.fixed + row * p.columns / 2);
  auto* const to = reinterpret_cast<float4*>(p.dkv + row * p.dkv_stride);
  const auto unpack = [&](std::uint64_t word, float& low, float& high) {
    const auto sum = static_cast<std::int64_t>(word - taken_off);
    const auto half = static_cast<std::int32_t>(sum);
    low += static_cast<float>(half) * unit;
    high += static_cast<float>(static_cast<std::int32_t>((sum - half) >> 32)) * unit;
  };
  constexpr int kPasses = 5;  // of 32 lanes with 4 columns each: 576 at most; all loads first
  ulonglong2 sums[kPasses];
  float4 totals[kPasses];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int quad = 32 * pass + lane;
    if (quad >= p.columns / 4) continue;
    sums[pass] = from[quad];
    totals[pass] = kEnded && p.one_chunk ? float4{} : to[quad];
  }
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int quad = 32 * pass + lane;
    if (quad >= p.columns / 4) continue;
    if constexpr (!kEnded) from[quad] = {0, 0};
    unpack(sums[pass].x, totals[pass].x, totals[pass].y);
    unpack(sums[pass].y, totals[pass].z, totals[pass].w);
    to[quad] = totals[pass];
  }
}

// Makes room in each row for the additions of the next chunk of queries, and sets the bounds back.
// A row that meets values that are not finite gets NaN. Warps have a row each.
inline constexpr int kRowThreads = 256;
inline constexpr int kRowsOfBlock = kRowThreads / 32;
static __global__ void __launch_bounds__(kRowThreads)
    settle_kernel(const __grid_constant__ Params p, std::int64_t s_kv) {
  const std::int64_t row = blockIdx.x * std::int64_t{kRowsOfBlock} + threadIdx.x / 32;
  if (row >= s_kv) return;
  const int lane = threadIdx.x % 32;
  const std::uint32_t count = p.row_counts[row];
  if (count == 0) return;
  // Each group of heads adds. A hundredth more: for what rounding adds before.
  const auto addends = std::uint64_t{count} * static_cast<unsigned>(ceil_div(p.blocks, 2));
  const float bound = 1.01f * __uint_as_float(p.row_bounds[row]);
  RowState state = p.row_states[row];
  const auto units = [&] { return static_cast<float>(addends) * (bound * state.scale + 1.0f); };
  const bool fits = state.addends > 0 && bound * state.scale <= kMostOfAddend &&
                    state.units + units() <= kMostOfSum;
  if (!fits) {
    if (state.addends > 0) fold_row<false>(p, row, state, lane);
    const float sum = bound * static_cast<float>(addends);
    int addend_exponent, sum_exponent;
    frexpf(bound, &addend_exponent);  // bound < 2^addend_exponent
    frexpf(sum, &sum_exponent);
    const int exponent =
        min(kAddendBits - addend_exponent, (p.one_chunk ? kOneSumBits : kSumBits) - sum_exponent);
    // Beside nothing but zeros there is no room for anything else.
    state = {ldexpf(1.0f, bound > 0 ? min(exponent, 126) : 126), 0, 0};
    if (!(sum < infinity())) state.scale = __uint_as_float(0x7fc00000u);
  }
  state.units += units();
  state.addends += addends;
  __syncwarp();
  if (lane != 0) return;
  p.row_states[row] = state;
  p.row_counts[row] = 0;
  p.row_bounds[row] = 0;
}

// After the last chunk. Where that is the only one, rows that nobody chose become zeros here.
static __global__ void __launch_bounds__(kRowThreads)
    fold_kernel(const __grid_constant__ Params p, std::int64_t s_kv) {
  const std::int64_t row = blockIdx.x * std::int64_t{kRowsOfBlock} + threadIdx.x / 32;
  if (row >= s_kv) return;
  const RowState state = p.row_states[row];
  const int lane = threadIdx.x % 32;
  if (state.addends > 0) return fold_row<true>(p, row, state, lane);
  if (!p.one_chunk) return;
  auto* const sums = reinterpret_cast<float4*>(p.dkv + row * p.dkv_stride);
  for (int quad = lane; quad < p.columns / 4; quad += 32) sums[quad] = {};
}

// Sums of a tile into integers: 16 lanes to 128 bytes of a row. The quads of four rows exchange
// what they hold of 4 x 8 columns, so that each adds its 8 columns to one row after the other.
struct FixedDrain {
  std::uint64_t policy = policy_evict_last();
  std::int32_t index[2][4];
  unsigned long long* to[2][4];
  float scale[2];

  __device__ __forceinline__ void begin(const Params& p, int query, int tile, int entries, int warp,
                                        int lane) {
    const std::int32_t* list = p.rows.indices + query * p.rows.indices_stride;
    const int first = tile * kTileRows + 16 * warp;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int entry = first + 8 * r + lane / 16 * 4 + k;
        index[r][k] = entry < entries ? __ldg(list + entry) : -1;
      }
      const int own = first + 8 * r + lane / 4;
      scale[r] = own < entries ? __ldg(&p.row_states[__ldg(list + own)].scale) : 0.0f;
    }
  }

  __device__ __forceinline__ void locate(const Params& p, int first_column, int lane) {
    const int column = first_column + (lane & 12) * 2 + (lane & 3) * 2;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const std::int64_t row = index[i / 4][i % 4];
      // Rows of `fixed` are as long as those of the f32 sums, without gaps.
      to[i / 4][i % 4] = row < 0 ? nullptr : p.fixed + (row * p.columns + column) / 2;
    }
  }

  __device__ __forceinline__ void add(int column, int lane, const float* v) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      unsigned long long w[4];
      row_words(v, r, scale[r], lane, w);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (to[r][k] != nullptr) reduce_add(to[r][k] + column / 2, w[k], policy);
      }
    }
  }
};

}  // namespace winnow::sparse_mla::backward_split_detail
