// Backward of top-k sparse MLA attention, sm90, deterministic with up to 64 heads: bounds of what
// the fused kernel (backward_fused_sm90.cuh) will add to the rows of dkv, before it adds anything.
//
// An addend of query i to row j is sum over heads h of P d_out + dS q. P is computed as in that
// kernel. dS is bounded by the lengths of d_out and of the row's values (Cauchy and Schwarz), so
// that half of the products are enough and nothing is stored:
//
//   |addend| <= sum over h of P[h,j] (A[h] + B[h] |v[j]|)
//   A = max |d_out[h]| + scale max |q[h]| |delta[h]|,  B = scale max |q[h]| |d_out[h]|
//
// Two warpgroups take the tiles in turn, so that the arithmetic of one hides behind the products of
// the other. The functions that gather and multiply are those of the split design's scores kernel.
#pragma once

#include <cstdint>

#include "winnow/sparse_mla/backward/backward_split_drain_sm90.cuh"
#include "winnow/sparse_mla/backward/backward_split_sm90.cuh"

namespace winnow::sparse_mla::backward_split_detail {

// A thread's two heads.
struct BoundHeads {
  float lse2[2], a[2], b[2];
};

// The largest magnitude in head lane / 4 + 8 r of the warp's 16 heads, which are as
// scores_load_heads() leaves them. NaN is largest.
template <int kSteps>
__device__ __forceinline__ float largest_of_head(const std::uint32_t (&q)[kSteps][4], int r) {
  std::uint32_t tops = 0;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    tops = __vmaxu2(tops, q[step][r] & 0x7fff7fffu);
    tops = __vmaxu2(tops, q[step][2 + r] & 0x7fff7fffu);
  }
  tops = max(tops & 0xffffu, tops >> 16);
  tops = max(tops, __shfl_xor_sync(kFullWarp, tops, 1));
  tops = max(tops, __shfl_xor_sync(kFullWarp, tops, 2));
  return __uint_as_float(tops << 16);
}

template <int kSteps>
__device__ __forceinline__ BoundHeads bound_heads(const Params& p, int query, int warp, int lane,
                                                  const std::uint32_t (&q)[kSteps][4]) {
  BoundHeads heads;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const std::int64_t at =
        static_cast<std::int64_t>(query) * kBlockHeads + 16 * warp + lane / 4 + 8 * r;
    heads.lse2[r] = __ldg(p.lse2 + at);
    const float2 d_out = __ldg(p.head_sizes + at);
    const float ds = fabsf(p.scale) * largest_of_head(q, r);
    const bool dead = heads.lse2[r] == infinity();  // whatever its delta is
    heads.a[r] = dead ? 0.0f : fmaf(ds, fabsf(__ldg(p.delta + at)), d_out.x);
    heads.b[r] = dead ? 0.0f : ds * d_out.y;
  }
  return heads;
}

// What a warp's heads contribute to the bounds of a tile: sums of P a and of P b over them. A lane
// gets those of two neighbouring columns, from pair_of_lane() on, as {a, b, a, b}.
__device__ __forceinline__ int pair_of_lane(int lane) {
  return 32 * (lane >> 4 & 1) + 16 * (lane >> 3 & 1) + 8 * (lane >> 2 & 1) + 2 * (lane & 3);
}
__device__ __forceinline__ uint4 bound_sums(const Params& p, const BoundHeads& heads,
                                            float (&s)[32]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) s[i] = ex2(fmaf(s[i], p.scale_log2, -heads.lse2[i / 2 % 2]));
  if (__any_sync(kFullWarp, fmaxf(heads.lse2[0], heads.lse2[1]) == infinity())) {
#pragma unroll
    for (int i = 0; i < 32; ++i) s[i] = heads.lse2[i / 2 % 2] < infinity() ? s[i] : 0.0f;
  }
  float a[16], b[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float upper = s[i / 2 * 4 + i % 2], lower = s[i / 2 * 4 + 2 + i % 2];
    a[i] = fmaf(lower, heads.a[1], upper * heads.a[0]);
    b[i] = fmaf(lower, heads.b[1], upper * heads.b[0]);
  }
  halve_columns<8, 16>(a);
  halve_columns<8, 16>(b);
  halve_columns<4, 8>(a);
  halve_columns<4, 8>(b);
  halve_columns<2, 4>(a);
  halve_columns<2, 4>(b);
  return {__float_as_uint(a[0]), __float_as_uint(b[0]), __float_as_uint(a[1]),
          __float_as_uint(b[1])};
}

// The row of an entry, by a load that the compiler does not move.
__device__ __forceinline__ std::int32_t row_now(const std::int32_t* list, int entry) {
  return load_now(list + entry);
}
__device__ __forceinline__ std::int32_t row_now(const RangedEntries& rows, int entry) {
  return rows.load(entry, true);
}

// A warpgroup bounds its tiles, every other one, and counts how often rows are chosen.
template <class Plan, class Kernel>
__device__ __forceinline__ void bound_tiles(const Kernel& p, Plan shared, int warpgroup) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  // [2 warpgroups, 2 buffers, 4 warps, 64 entries]: the warps' contributions, in the memory that
  // the scores kernel uses for images.
  const auto shares = Place<std::uint64_t[2][2][4][kTileRows]>{shared.p().address}[warpgroup];
  std::uint32_t q[Plan::kSteps][4];
  PipelineState<Plan::kStages> ring;
  std::uint32_t count = 0;  // of tiles so far, of both warpgroups
  ScoresItem item;
  for (int number = 0; scores_item(p, number, item); ++number) {
    if (item.first_tile == item.end_tile) continue;
    scores_load_heads(shared, ring, q);
    const BoundHeads heads = bound_heads(p, item.query, warp, lane, q);
    // Thread n of the first 64 completes the bound of entry n. It loads the entry's row a tile
    // ahead, and the row's length before the products; ordinary loads the compiler would put among
    // the products.
    const auto list = entries_of(p, item.query);
    const auto row_of = [&](int tile) {
      const int entry = tile * kTileRows + thread;
      return thread < kTileRows && entry < item.entries ? row_now(list, entry) : -1;
    };
    std::int32_t next = row_of(item.first_tile + static_cast<int>((warpgroup + count) % 2));
    for (int tile = item.first_tile; tile < item.end_tile; ++tile, ++count) {
      if (static_cast<int>(count % 2) != warpgroup) {
        scores_skip(shared, ring);
        continue;
      }
      const std::int32_t row = next;
      const float length = row < 0 ? 0.0f : load_now(p.row_sizes + row);
      next = row_of(tile + 2);
      const std::uint32_t own = count / 2;
      float s[32];
      scores_multiply(shared, ring, warpgroup, (own + 1 + warpgroup) % 2, q, s);
      const uint4 sums = bound_sums(p, heads, s);
      const auto buffer = shares[own % 2];
      st_shared(buffer[warp][pair_of_lane(lane)].address, sums);
      bar_sync<128>(1 + warpgroup);
      if (row >= 0) {
        float bound = 0;
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const std::uint64_t share = buffer[w][thread].load();
          bound += fmaf(__uint_as_float(static_cast<std::uint32_t>(share >> 32)), length,
                        __uint_as_float(static_cast<std::uint32_t>(share)));
        }
        atomicMax(p.row_bounds + row, __float_as_uint(fabsf(bound)));  // NaN is largest
        atomicAdd(p.row_counts + row, 1u);
      }
      __syncwarp();
    }
  }
}

// Kernel: Params, or WithRanges of them.
template <int kColumns, class Kernel>
__global__ void __launch_bounds__(kScoresThreads, 1)
    bounds_kernel(const __grid_constant__ Kernel p) {
  using Plan = ScoresPlan<kColumns>;
  const Plan shared{shared_address(dynamic_shared<1024>())};
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < Plan::kStages; ++slot) {
      shared.full()[slot].init(kGatherThreads);
      shared.empty()[slot].init(8 * kWarpArrival);
    }
    for (int i = 0; i < 2; ++i) shared.ping_pong()[i].init(4 * kWarpArrival);
    fence_mbarrier_init();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
  if (warpgroup < 2) {
    setmaxnreg_inc<kScoresRegisters>();
    bound_tiles(p, shared, warpgroup);
  } else {
    setmaxnreg_dec<kScoresGatherRegisters>();
    scores_gather<false>(p, shared);
  }
}

// Computes |v| of every row of the cache, each in one warp.
static __global__ void __launch_bounds__(kRowThreads)
    row_sizes_kernel(const __grid_constant__ Params p, std::int64_t s_kv) {
  const std::int64_t row = blockIdx.x * std::int64_t{kRowsOfBlock} + threadIdx.x / 32;
  if (row >= s_kv) return;
  const int lane = threadIdx.x % 32;
  const float2 sizes = sizes_of_values(p.chosen.kv + row * p.chosen.kv_stride, lane);
  if (lane == 0) p.row_sizes[row] = sizes.y;
}

}  // namespace winnow::sparse_mla::backward_split_detail
