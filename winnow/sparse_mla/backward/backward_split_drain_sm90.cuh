// Backward of top-k sparse MLA attention, sm90, for many heads: how the dkv kernel
// (backward_split_products_sm90.cuh) adds the sums of a tile, 64 entries x a slice of the columns,
// to the rows of dkv. Two classes with the same interface do this:
//
//   FloatDrain  f32 reductions in any order
//   FixedDrain  integer reductions, whose sum does not depend on the order: deterministic mode
//
// The kernel calls begin() before the products, locate() after them, then add() for each 32
// columns. A warp has 16 entries, as in the accumulators of wgmma (device/sm90/wgmma.cuh). Each
// instruction adds to 128 contiguous bytes of a row; with 64 the kernel would be a fifth slower.
#pragma once

#include <cstdint>

#include "winnow/sparse_mla/backward/backward_split_sm90.cuh"

namespace winnow::sparse_mla::backward_split_detail {

// ---- f32 ---------------------------------------------------------------------------------------

// The sums of four neighbouring columns of row r. v: the accumulators of two neighbouring j
// (device/sm90/wgmma.cuh), 16 columns. Lanes 0, 2, 1 and 3 of a quad get columns 0-3, 4-7, 8-11 and
// 12-15: of each pair of lanes the even one gets columns of the first j, the odd one of the second.
__device__ __forceinline__ float4 four_columns(const float* v, int r, int lane) {
  const bool odd = lane & 1;
  const float a0 = v[2 * r], a1 = v[2 * r + 1], b0 = v[4 + 2 * r], b1 = v[4 + 2 * r + 1];
  const float got0 = __shfl_xor_sync(kFullWarp, odd ? a0 : b0, 1);
  const float got1 = __shfl_xor_sync(kFullWarp, odd ? a1 : b1, 1);
  return {odd ? got0 : a0, odd ? got1 : a1, odd ? b0 : got0, odd ? b1 : got1};
}

// Adds sums of a tile in f32. Eight lanes add to 128 bytes of a row: two quads with neighbouring
// rows add half of 32 columns each, both first to the upper row, then to the lower one.
struct FloatDrain {
  std::uint64_t policy = policy_evict_last();
  std::int32_t index[2][2];
  float* to[2][2];  // [r][i]: where the lane adds in row i of the pair, plus 8 r

  // Starts to load the indices of the rows, which arrive during the products.
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

  // Adds 32 columns, from `column` of the slice. v: the accumulators of four neighbouring j.
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
// The deterministic mode adds integers. Before the tiles of a chunk of queries are added, each row
// that they chose gets a scale, a power of two, with which neither its addends nor its sum can
// overflow. An addend is a sum over heads of P d_out + dS q, so the norms of P and dS over the
// heads times those of d_out and q bound it (Hoelder); the kernel `scores` stores the largest norms
// of each tile for 16 heads at a time. A row keeps its scale from chunk to chunk while its sum has
// room; otherwise the sum is first added to the f32 sums. After the last chunk all sums are. These
// are the limits, in units, of an addend, which must keep the exponent of kRounder, and of a sum.
inline constexpr float kMostOfAddend = 4194304.0f;  // 2^22
inline constexpr float kMostOfSum = 2147479552.0f;  // 2^31 - 2^12
// A new scale leaves room for larger addends and, unless there is only one chunk, for further sums.
inline constexpr int kAddendBits = 21, kSumBits = 28, kOneSumBits = 30;

// Stores a bound of the addends of each row. A block has a query, a warp a tile.
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
      // Most bounds are below the stored one and need no atomic operation.
      if (bits > ld_relaxed_gpu(p.row_bounds + row)) atomicMax(p.row_bounds + row, bits);
      atomicAdd(p.row_counts + row, 1u);
    }
  }
}

// Adds a row's integers to its f32 sums; a warp calls it. kEnded: this is the last addition to the
// row, so the integers are not set to zero. After a single chunk the f32 sums are overwritten,
// since nothing has initialised them.
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
  constexpr int kPasses =
      5;  // of 32 lanes with 4 columns each, for up to 576; all loads come first
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

// Makes room in each row for the additions of the next chunk of queries, and resets the bounds. A
// row with addends that are not finite becomes NaN. Each warp has a row.
inline constexpr int kRowThreads = 256;
inline constexpr int kRowsOfBlock = kRowThreads / 32;
static __global__ void __launch_bounds__(kRowThreads)
    settle_kernel(const __grid_constant__ Params p, std::int64_t s_kv) {
  const std::int64_t row = blockIdx.x * std::int64_t{kRowsOfBlock} + threadIdx.x / 32;
  if (row >= s_kv) return;
  const int lane = threadIdx.x % 32;
  const std::uint32_t count = p.row_counts[row];
  if (count == 0) return;
  // Each group of heads adds once. The bound is raised by 1 % for earlier rounding errors.
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
    // If all addends are zero, the row gets the largest scale, and a new one before others.
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

// After the last chunk: adds all integers to the f32 sums. After a single chunk, sets rows that no
// query chose to zero.
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

// Adds sums of a tile as integers. 16 lanes add to 128 bytes of a row: the quads of four rows
// exchange 4 x 8 columns, so that each adds its 8 columns to one row after the other.
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
      // Rows of `fixed` are contiguous, with p.columns elements.
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
