// Backward of top-k sparse MLA attention, for GPUs of compute capability 8.0 and newer: the
// kernels.
//
// For a chunk of queries, in turn:
//   scores   P and dS of a query's tiles and 64 heads, in bf16, to the workspace
//   dq       dq = dS K of a query and 64 heads
//   dkv      dS^T Q + P^T dO of a query and 64 of its entries, over all heads; added to the rows
// so that a row is added to once for each query that sees it. Before them prepare() finds delta and
// lse' of every head, after them finish() gives dkv its dtype, and sink_kernel() sums d_sink.
//
// Tiles of 32 entries are those of QueryTiles, numbered over both sources; the rows of the second
// source are numbered on from those of the first. A head is dead whose sink is +inf, or that does
// not exist: its lse' is +inf, and nothing of it is multiplied.
//
// kFixed, the deterministic mode: dkv is summed in 64-bit integers, whose additions have no order.
// All share one unit, which is found from the largest finite magnitudes of what is multiplied: with
// P of a head and query summing to at most 1, no sum can reach 2^62 units. Of a row that gets an
// addend that is not finite, all columns become NaN.
#pragma once

#include <cstdint>

#include "winnow/sparse_mla/attention_cuda.cuh"
#include "winnow/sparse_mla/two_sources.cuh"

namespace winnow::sparse_mla::backward_cuda_detail {

using namespace winnow::sparse_mla::attention_cuda;

inline constexpr int kPairRows = 2 * kRows;  // entries of a block of dkv_kernel
inline constexpr int kStepHeads = 16;        // of a step of it

struct Bounds {  // largest finite magnitudes, as bits
  std::uint32_t q, d_out, delta, kv;
};

struct KernelParams {
  TwoSources sources;
  const char *q, *out, *d_out;  // out is null where delta is given
  std::int64_t q_stride0, q_stride1, out_stride0, out_stride1, d_out_stride0,
      d_out_stride1;                         // bytes
  Rows<const float*> lse, delta, attn_sink;  // the last two may be absent
  float scale;
  int h_q, heads;            // heads: padded to 64
  std::int32_t first_rows;   // of the first source
  std::int32_t columns;      // of the weights: entries of all tiles, padded to kPairRows
  std::int64_t first_query;  // of the chunk
  std::int64_t s_q;
  float *lse2, *deltas;  // [s_q, heads]: lse' in base 2, and delta
  float* shares;         // [s_q, h_q]: what the query adds to d_sink; or null
  std::uint32_t* rows;   // [rows], kFixed: 1 is seen, 2 gets what is not finite
  Bounds* bounds;        // kFixed
  char* weights;         // [chunk, 2, heads, columns], bf16: P, dS
  void* sums;            // [rows, d_qk], f32, or kFixed 64-bit integers
  char* dq;
  std::int64_t dq_stride0, dq_stride1;  // bytes
  bool dq_f32;
};

// Where a row of the weights of a query of the chunk begins. `which`: 0 is P, 1 dS.
__device__ __forceinline__ char* weights_at(const KernelParams& params, std::int64_t chunk_query,
                                            int which, int head) {
  return params.weights +
         ((chunk_query * 2 + which) * params.heads + head) * (std::int64_t{params.columns} * 2);
}

// The number of the row that an entry names, over both sources.
__device__ __forceinline__ std::int64_t row_number(const KernelParams& params,
                                                   const QueryTiles<kRows>& entries, int tile,
                                                   std::int32_t entry) {
  return entries.is_second(tile) ? std::int64_t{params.first_rows} + entry : entry;
}

__device__ __forceinline__ bool is_visible(const QueryTiles<kRows>& entries, int tile,
                                           std::int32_t entry) {
  return static_cast<std::uint32_t>(entry) < entries.visible(tile);
}

// --- before: delta, lse', and what bounds the sums ----------------------------------------------

// The largest finite magnitude of 8 bf16.
__device__ __forceinline__ std::uint32_t largest_of(const uint4& words, std::uint32_t largest) {
  const std::uint32_t all[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::uint32_t bits = (half == 0 ? all[i] << 16 : all[i]) & 0x7fff0000u;
      if (bits < 0x7f800000u) largest = max(largest, bits);
    }
  }
  return largest;
}

__device__ __forceinline__ void raise_bound(std::uint32_t* bound, std::uint32_t largest, int lane) {
  largest = __reduce_max_sync(kFullWarp, largest);
  if (lane == 0 && largest > 0) atomicMax(bound, largest);
}

// A block has a query; a warp every eighth of its heads.
template <int kDim, bool kFixed>
__global__ void __launch_bounds__(kThreads)
    prepare_kernel(const __grid_constant__ KernelParams params) {
  WINNOW_BLOCK_SHARED(limits, std::int32_t[4]);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const std::int64_t query = blockIdx.x;
  if (thread < 4) limits[thread] = load_limits(params.sources, query, lane);
  __syncthreads();
  const QueryTiles<kRows> entries(params.sources, query, limits[lane & 3]);
  bool sees = false;
  for (int tile = warp; tile < entries.tiles(); tile += kWarps) {
    const std::int32_t entry = entries.load(tile, lane);
    if (!is_visible(entries, tile, entry)) continue;
    sees = true;
    if constexpr (kFixed) params.rows[row_number(params, entries, tile, entry)] = 1;
  }
  sees = __syncthreads_or(sees);

  std::uint32_t largest_q = 0, largest_d_out = 0, largest_delta = 0;
  for (int head = warp; head < params.heads; head += kWarps) {
    const std::int64_t at = query * params.heads + head;
    const bool exists = head < params.h_q;
    float sink = negative_infinity();
    if (exists && params.attn_sink.present()) {
      sink = __ldg(params.attn_sink.data + params.attn_sink.offset(head)) * kLog2e;
    }
    const bool dead = !exists || !sees || sink == infinity();
    float delta = 0, lse2 = infinity();
    if (!dead) {
      const float lse = __ldg(params.lse.data + params.lse.offset(query) + head) * kLog2e;
      lse2 = sink == negative_infinity() ? lse : log2_add(lse, sink);
      const char* const d_out =
          params.d_out + query * params.d_out_stride0 + head * params.d_out_stride1;
      if (params.delta.present()) {
        delta = __ldg(params.delta.data + params.delta.offset(query) + head);
      } else {
        const char* const out = params.out + query * params.out_stride0 + head * params.out_stride1;
#pragma unroll
        for (int unit = 0; unit < kValueColumns / 8; unit += 32) {
          delta += dot_bf16x8(__ldg(reinterpret_cast<const uint4*>(out) + unit + lane),
                              __ldg(reinterpret_cast<const uint4*>(d_out) + unit + lane));
        }
        delta = warp_sum(delta);
      }
      if constexpr (kFixed) {
        const char* const q = params.q + query * params.q_stride0 + head * params.q_stride1;
        for (int unit = lane; unit < kDim / 8; unit += 32) {
          largest_q = largest_of(__ldg(reinterpret_cast<const uint4*>(q) + unit), largest_q);
        }
        for (int unit = lane; unit < kValueColumns / 8; unit += 32) {
          largest_d_out =
              largest_of(__ldg(reinterpret_cast<const uint4*>(d_out) + unit), largest_d_out);
        }
        const std::uint32_t magnitude = __float_as_uint(delta) & 0x7fffffffu;
        if (magnitude < 0x7f800000u) largest_delta = max(largest_delta, magnitude);
      }
    }
    if (lane != 0) continue;
    params.lse2[at] = lse2;
    params.deltas[at] = delta;
    if (exists && params.shares != nullptr) {
      params.shares[query * params.h_q + head] =
          dead || sink == negative_infinity() ? 0.0f : ex2(sink - lse2) * delta;
    }
  }
  if constexpr (kFixed) {
    raise_bound(&params.bounds->q, largest_q, lane);
    raise_bound(&params.bounds->d_out, largest_d_out, lane);
    raise_bound(&params.bounds->delta, largest_delta, lane);
  }
}

// kFixed: the rows that are seen. A warp has a row.
__global__ void __launch_bounds__(kThreads)
    bound_rows_kernel(const char* kv, std::int64_t stride, std::int64_t count, int units,
                      const std::uint32_t* seen, Bounds* bounds) {
  const std::int64_t row = blockIdx.x * std::int64_t{kWarps} + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= count || seen[row] == 0) return;
  std::uint32_t largest = 0;
  for (int unit = lane; unit < units; unit += 32) {
    largest = largest_of(__ldg(reinterpret_cast<const uint4*>(kv + row * stride) + unit), largest);
  }
  raise_bound(&bounds->kv, largest, lane);
}

// Units in 1, a power of two: the largest sum has fewer than 2^62.
__device__ __forceinline__ float units_of(const KernelParams& params) {
  const Bounds bounds = *params.bounds;
  const auto value = [](std::uint32_t bits) { return __uint_as_float(bits); };
  const float d_p = kValueColumns * value(bounds.d_out) * value(bounds.kv) + value(bounds.delta);
  const float addend = d_p * fabsf(params.scale) * value(bounds.q) + value(bounds.d_out);
  // Four for roundings, and for an lse that is a little less than that of these logits.
  const float all = 4.0f * addend * static_cast<float>(params.h_q) * static_cast<float>(params.s_q);
  const int exponent = static_cast<int>(__float_as_uint(all) >> 23) - 127 + 1;
  return __uint_as_float(static_cast<std::uint32_t>(min(max(62 - exponent, -126), 127) + 127)
                         << 23);
}

// --- P and dS -----------------------------------------------------------------------------------

// Blocks count the blocks of heads of a query first.
template <class P>
__global__ void __launch_bounds__(kThreads, 1)
    scores_kernel(const __grid_constant__ KernelParams params) {
  const P shared{shared_address(dynamic_shared<128>())};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const std::uint32_t head_blocks = params.heads / kHeads;
  const std::int64_t chunk_query = blockIdx.x / head_blocks,
                     query = params.first_query + chunk_query;
  const int first = static_cast<int>(blockIdx.x % head_blocks) * kHeads;
  const int heads = min(params.h_q - first, kHeads);

  if (threadIdx.x < 4) shared.limits()[lane].store(load_limits(params.sources, query, lane));
  __syncthreads();  // the limits are there
  const QueryTiles<kRows> entries(params.sources, query, shared.limits()[lane & 3].load());
  const int tiles = ceil_div(entries.tiles(), 2) * 2;  // of whole pairs
  std::int32_t entry = entries.load(0, lane);
  const auto copy = [&](int tile) {
    const std::uint32_t mask = __ballot_sync(kFullWarp, is_visible(entries, tile, entry));
    const GatherView& rows = entries.rows(tile);
    copy_rows<P>(shared.rows()[tile & 1], entry, mask, warp, lane, policy_evict_last(),
                 [&](std::int64_t row) { return rows.kv + row * rows.kv_stride; });
    cp_async_commit();
    entry = entries.load(tile + 1, lane);
    return mask;
  };
  std::uint32_t next_mask = tiles > 0 ? copy(0) : 0;

  Queries<P> q;
  load_queries<P>(params.q + query * params.q_stride0 + first * params.q_stride1, params.q_stride1,
                  heads, warp, lane, q);
  std::uint32_t d_out[P::kBlocks][kValueColumns / 16 / P::kParts][4];
  load_queries<P>(params.d_out + query * params.d_out_stride0 + first * params.d_out_stride1,
                  params.d_out_stride1, heads, warp, lane, d_out);
  const int row = 8 * warp + lane / 4;
  const float lse2 = params.lse2[query * params.heads + first + row];
  const float delta = params.deltas[query * params.heads + first + row];
  const bool dead = lse2 == infinity();
  const float scale2 = params.scale * kLog2e;

  for (int tile = 0; tile < tiles; ++tile) {
    const std::uint32_t mask = next_mask;
    cp_async_wait<0>();  // of the rows
    __syncthreads();     // the tile is there, and the tile before is done with
    if (tile + 1 < tiles) next_mask = copy(tile + 1);
    float logits[2][4], d_p[2][4];
    multiply_scores(shared, tile & 1, warp, lane, q);
    __syncthreads();  // the logits are there
    load_logits(shared, warp, lane, logits);
    __syncthreads();  // they are loaded
    multiply_scores(shared, tile & 1, warp, lane, d_out);
    __syncthreads();  // dP is there
    load_logits(shared, warp, lane, d_p);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int unit = logit_unit(lane, i);
      float p[4], d_s[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool counts = !dead && sees(mask, lane, i, e);
        p[e] = counts ? ex2(fmaf(logits[i][e], scale2, -lse2)) : 0.0f;
        d_s[e] = counts ? p[e] * (d_p[i][e] - delta) * params.scale : 0.0f;
      }
      const std::int64_t at = (std::int64_t{tile} * kRows + 4 * unit) * 2;
      *reinterpret_cast<uint2*>(weights_at(params, chunk_query, 0, first + row) + at) =
          make_uint2(pack_bf16(p[0], p[1]), pack_bf16(p[2], p[3]));
      *reinterpret_cast<uint2*>(weights_at(params, chunk_query, 1, first + row) + at) =
          make_uint2(pack_bf16(d_s[0], d_s[1]), pack_bf16(d_s[2], d_s[3]));
    }
  }
}

// --- dq -----------------------------------------------------------------------------------------

template <int kDim>
struct DqMemory {
  Tile<kRows, kDim> rows[2];
  Tile<kHeads, 64> weights[2];  // dS of a tile, in half of the columns
  std::int32_t limits[4];
};
template <int kDim_>
struct DqPlan : Shared<DqMemory<kDim_>> {
  using Memory = DqMemory<kDim_>;
  static constexpr int kDim = kDim_;
  WINNOW_PLACE(rows)
  WINNOW_PLACE(weights)
  WINNOW_PLACE(limits)
};

// A warp has kDim / 8 of the columns, in blocks of 8.
template <int kDim>
__global__ void __launch_bounds__(kThreads, 1)
    dq_kernel(const __grid_constant__ KernelParams params) {
  using P = DqPlan<kDim>;
  constexpr int kBlocks = kDim / 8 / kWarps;
  const P shared{shared_address(dynamic_shared<128>())};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const std::uint32_t head_blocks = params.heads / kHeads;
  const std::int64_t chunk_query = blockIdx.x / head_blocks,
                     query = params.first_query + chunk_query;
  const int first = static_cast<int>(blockIdx.x % head_blocks) * kHeads;

  if (threadIdx.x < 4) shared.limits()[lane].store(load_limits(params.sources, query, lane));
  __syncthreads();  // the limits are there
  const QueryTiles<kRows> entries(params.sources, query, shared.limits()[lane & 3].load());
  const int tiles = entries.tiles();
  std::int32_t entry = entries.load(0, lane);
  const auto copy = [&](int tile) {
    const std::uint64_t policy = policy_evict_last();
    const std::uint32_t mask = __ballot_sync(kFullWarp, is_visible(entries, tile, entry));
    const GatherView& rows = entries.rows(tile);
    copy_rows<P>(shared.rows()[tile & 1], entry, mask, warp, lane, policy,
                 [&](std::int64_t row) { return rows.kv + row * rows.kv_stride; });
    const int head = threadIdx.x / 4, unit = threadIdx.x % 4;
    cp_async_zfill<128>(in_one_register(shared.weights()[tile & 1].unit(head, unit), lane),
                        weights_at(params, chunk_query, 1, first + head) +
                            (std::int64_t{tile} * kRows + 8 * unit) * 2,
                        true, policy);
    cp_async_commit();
    entry = entries.load(tile + 1, lane);
  };
  if (tiles > 0) copy(0);
  float d[kHeads / 16][kBlocks][4] = {};
  for (int tile = 0; tile < tiles; ++tile) {
    cp_async_wait<0>();  // of rows and dS
    __syncthreads();     // the tile is there, and that before is done with
    if (tile + 1 < tiles) copy(tile + 1);
    const auto weights = shared.weights()[tile & 1].squares(lane);
    const auto rows = shared.rows()[tile & 1];
    std::uint32_t a[kHeads / 16][kRows / 16][4];
#pragma unroll
    for (int m = 0; m < kHeads / 16; ++m) {
#pragma unroll
      for (int k16 = 0; k16 < kRows / 16; ++k16) {
        ldmatrix_x4(weights.at(m, k16), a[m][k16][0], a[m][k16][1], a[m][k16][2], a[m][k16][3]);
      }
    }
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      std::uint32_t b[4];  // the block's columns of all 32 rows
      ldmatrix_x4_trans(rows.unit(lane, kBlocks * warp + n), b[0], b[1], b[2], b[3]);
#pragma unroll
      for (int m = 0; m < kHeads / 16; ++m) {
        mma_m16n8k16<DType::bf16>(d[m][n], a[m][0], b[0], b[1]);
        mma_m16n8k16<DType::bf16>(d[m][n], a[m][1], b[2], b[3]);
      }
    }
  }
#pragma unroll
  for (int m = 0; m < kHeads / 16; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int head = first + 16 * m + lane / 4 + 8 * r;
      if (head >= params.h_q) continue;
      // 0 times an infinity of a row is no part of a dead head's gradient.
      const bool dead = params.lse2[query * params.heads + head] == infinity();
      char* const to = params.dq + query * params.dq_stride0 + head * params.dq_stride1;
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        const int column = 8 * (kBlocks * warp + n) + lane % 4 * 2;
        const float x = dead ? 0.0f : d[m][n][2 * r], y = dead ? 0.0f : d[m][n][2 * r + 1];
        if (params.dq_f32) {
          *reinterpret_cast<float2*>(to + 4 * column) = make_float2(x, y);
        } else {
          *reinterpret_cast<std::uint32_t*>(to + 2 * column) = pack_bf16(x, y);
        }
      }
    }
  }
}

// --- dkv ----------------------------------------------------------------------------------------

template <int kDim>
struct DkvStep {  // 16 heads
  Tile<kStepHeads, kDim> q;
  Tile<kStepHeads, kValueColumns> d_out;
  Tile<kStepHeads, kPairRows> weights[2];  // P, dS
};
template <int kDim>
struct DkvStepPlan : Shared<DkvStep<kDim>> {
  using Memory = DkvStep<kDim>;
  WINNOW_PLACE(q)
  WINNOW_PLACE(d_out)
  WINNOW_PLACE(weights)
};
template <int kDim>
struct DkvMemory {
  DkvStep<kDim> steps[2];
  std::int32_t limits[4];
};
template <int kDim>
struct DkvPlan : Shared<DkvMemory<kDim>> {
  using Memory = DkvMemory<kDim>;
  WINNOW_PLACE(steps)
  WINNOW_PLACE(limits)
};

// Starts the copies of a step. What a dead head has becomes zeros.
template <int kDim>
__device__ __forceinline__ void copy_step(const KernelParams& params, DkvStepPlan<kDim> shared,
                                          std::int64_t chunk_query, int pair, int step) {
  const std::uint64_t policy = policy_evict_last();
  const std::int64_t query = params.first_query + chunk_query;
  const int row = threadIdx.x / 16, lane = threadIdx.x % 16, head = kStepHeads * step + row;
  const bool lives = params.lse2[query * params.heads + head] != infinity();
  const int mine = lives ? head : 0;
  const char* const q = params.q + query * params.q_stride0 + mine * params.q_stride1;
  const char* const d_out =
      params.d_out + query * params.d_out_stride0 + mine * params.d_out_stride1;
#pragma unroll
  for (int first = 0; first < kDim / 8; first += 16) {
    const int unit = first + lane;
    if (unit < kDim / 8) {
      cp_async_zfill<128>(shared.q().unit(row, unit), q + unit * kUnitBytes, lives, policy);
    }
  }
#pragma unroll
  for (int first = 0; first < kValueColumns / 8; first += 16) {
    const int unit = first + lane;
    cp_async_zfill<128>(shared.d_out().unit(row, unit), d_out + unit * kUnitBytes, lives, policy);
  }
  const int which = lane / 8, unit = lane % 8;
  cp_async_zfill<128>(shared.weights()[which].unit(row, unit),
                      weights_at(params, chunk_query, which, head) +
                          std::int64_t{pair} * kPairRows * 2 + unit * kUnitBytes,
                      true, policy);
  cp_async_commit();
}

// A warp has kDim / 8 of the columns, in blocks of 8. Blocks count the pairs of tiles of a query
// first.
template <int kDim, bool kFixed>
__global__ void __launch_bounds__(kThreads, 1)
    dkv_kernel(const __grid_constant__ KernelParams params) {
  constexpr int kBlocks = kDim / 8 / kWarps;
  const DkvPlan<kDim> shared{shared_address(dynamic_shared<128>())};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const std::uint32_t pairs = params.columns / kPairRows;
  const int pair = static_cast<int>(blockIdx.x % pairs);
  const std::int64_t chunk_query = blockIdx.x / pairs, query = params.first_query + chunk_query;
  if (threadIdx.x < 4) shared.limits()[lane].store(load_limits(params.sources, query, lane));
  __syncthreads();  // the limits are there
  const QueryTiles<kRows> entries(params.sources, query, shared.limits()[lane & 3].load());
  if (2 * pair >= entries.tiles()) return;

  const int steps = ceil_div(params.h_q, kStepHeads);
  float d[kPairRows / 16][kBlocks][4] = {};
  copy_step<kDim>(params, {shared.steps()[0].address}, chunk_query, pair, 0);
  for (int step = 0; step < steps; ++step) {
    cp_async_wait<0>();  // of the step
    __syncthreads();     // the step is there, and the step before is done with
    if (step + 1 < steps) {
      copy_step<kDim>(params, {shared.steps()[(step + 1) & 1].address}, chunk_query, pair,
                      step + 1);
    }
    const DkvStepPlan<kDim> here{shared.steps()[step & 1].address};
    std::uint32_t p[kPairRows / 16][4], d_s[kPairRows / 16][4];
    const auto p_squares = here.weights()[0].squares(lane),
               d_s_squares = here.weights()[1].squares(lane);
#pragma unroll
    for (int m = 0; m < kPairRows / 16; ++m) {
      ldmatrix_x4_trans(p_squares.at(0, m), p[m][0], p[m][2], p[m][1], p[m][3]);
      ldmatrix_x4_trans(d_s_squares.at(0, m), d_s[m][0], d_s[m][2], d_s[m][1], d_s[m][3]);
    }
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const int unit = kBlocks * warp + n;
      const bool has_value = unit < kValueColumns / 8;
      // Half of the lanes name rows of Q, the others those of dO.
      std::uint32_t b[4];
      ldmatrix_x4_trans(lane < 16 || !has_value ? here.q().unit(lane % 16, unit)
                                                : here.d_out().unit(lane % 16, unit),
                        b[0], b[1], b[2], b[3]);
#pragma unroll
      for (int m = 0; m < kPairRows / 16; ++m) {
        mma_m16n8k16<DType::bf16>(d[m][n], d_s[m], b[0], b[1]);
        if (has_value) mma_m16n8k16<DType::bf16>(d[m][n], p[m], b[2], b[3]);
      }
    }
  }

  const float units = kFixed ? units_of(params) : 0.0f;
#pragma unroll
  for (int m = 0; m < kPairRows / 16; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int at = 16 * m + lane / 4 + 8 * r, tile = 2 * pair + at / kRows;
      const std::int32_t entry = entries.load(tile, at % kRows);
      if (!is_visible(entries, tile, entry)) continue;
      const std::int64_t row = row_number(params, entries, tile, entry);
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float x = d[m][n][2 * r + e];
          const std::int64_t to = row * kDim + 8 * (kBlocks * warp + n) + lane % 4 * 2 + e;
          if constexpr (kFixed) {
            if (!(fabsf(x) < infinity())) params.rows[row] = 2;
            reduce_add(static_cast<unsigned long long*>(params.sums) + to,
                       static_cast<unsigned long long>(__float2ll_rn(x * units)));
          } else {
            reduce_add(static_cast<float*>(params.sums) + to, x);
          }
        }
      }
    }
  }
}

// --- after --------------------------------------------------------------------------------------

// dkv of `count` rows from `first` on in its dtype, f32 or bf16. A thread has an element.
template <bool kFixed>
__global__ void __launch_bounds__(kThreads)
    finish_kernel(const __grid_constant__ KernelParams params, std::int64_t first,
                  std::int64_t count, int d_qk, char* to, std::int64_t stride, bool f32) {
  const std::int64_t at = blockIdx.x * std::int64_t{kThreads} + threadIdx.x;
  if (at >= count * d_qk) return;
  const std::int64_t row = at / d_qk, column = at % d_qk;
  float x;
  if constexpr (kFixed) {
    const auto sum = static_cast<const long long*>(params.sums)[first * d_qk + at];
    x = static_cast<float>(static_cast<double>(sum) / static_cast<double>(units_of(params)));
    if (params.rows[first + row] == 2) x = __uint_as_float(0x7fffffffu);
  } else {
    x = static_cast<const float*>(params.sums)[first * d_qk + at];
  }
  char* const element = to + row * stride;
  if (f32) {
    reinterpret_cast<float*>(element)[column] = x;
  } else {
    reinterpret_cast<std::uint16_t*>(element)[column] =
        static_cast<std::uint16_t>(pack_bf16(x, 0.0f));
  }
}

// d_sink of a head in each block, in a fixed order.
__global__ void __launch_bounds__(kThreads)
    sink_kernel(const float* shares, std::int64_t s_q, int h_q, Rows<float*> d_sink) {
  WINNOW_BLOCK_SHARED(sums, float[kWarps]);
  float sum = 0;
  for (std::int64_t i = threadIdx.x; i < s_q; i += kThreads) sum += shares[i * h_q + blockIdx.x];
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int warp = 1; warp < kWarps; ++warp) sum += sums[warp];
  d_sink.data[d_sink.offset(blockIdx.x)] = -sum;
}

}  // namespace winnow::sparse_mla::backward_cuda_detail
