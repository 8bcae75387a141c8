// Backward of top-k sparse MLA attention, for GPUs of compute capability 8.0 and newer: the
// kernels.
//
// prepare() finds delta and lse' of every head; then a block takes one query after another, and of
// its entries up to kSegment at a time, in phases:
//   numbers  the row of each entry, to shared memory
//   scores   P and dS of 64 heads after the other, in 16 bits, to the block's part of the workspace
//   dq       dq = dS K, of 128 heads and half of the columns or of 64 heads and all of them
//   dkv      dS^T Q + P^T dO of 128 entries and half of the columns, over all heads; added to the
//            rows
// so that a row is added to once for each query that sees it. After them finish() gives dkv its
// dtype, and sink_kernel() sums d_sink. Numbers of tiles that only the device knows cost nothing
// so: with a launch for each phase, queries of ranges would need room for all rows.
//
// The rows of the second source are numbered on from those of the first. A head is dead whose sink
// is +inf, or that does not exist: its lse' is +inf, and nothing of it is multiplied.
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

// Entries of which a block holds P and dS.
inline constexpr int kSegment = 2048, kSegmentTiles = kSegment / kRows;
inline constexpr int kGroupRows = 128;  // entries of a product of dkv
inline constexpr int kGroupTiles = kGroupRows / kRows;
static_assert(kSegment % kGroupRows == 0);

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
  int h_q, heads;           // heads: padded to 64
  std::int32_t first_rows;  // of the first source
  std::int32_t columns;     // of the weights: entries of a segment, padded to kGroupRows
  std::int64_t s_q;
  std::uint32_t* taken;  // how many queries blocks have taken beside their first ones
  float *lse2, *deltas;  // [s_q, heads]: lse' in base 2, and delta
  float* shares;         // [s_q, h_q]: what the query adds to d_sink; or null
  std::uint32_t* rows;   // [rows], kFixed: 1 is seen, 2 gets what is not finite
  Bounds* bounds;        // kFixed
  char* weights;         // [blocks, 2, heads, columns], as q: P, dS
  float* dq_sums;        // [blocks, heads, d_qk]: dq of the segments before; or null
  void* sums;            // [rows, d_qk], f32, or kFixed 64-bit integers
  char* dq;
  std::int64_t dq_stride0, dq_stride1;  // bytes
  bool dq_f32;
};

// Where a row of the block's weights begins. `which`: 0 is P, 1 dS.
__device__ __forceinline__ char* weights_at(const KernelParams& params, int which, int head) {
  return params.weights + ((std::int64_t{blockIdx.x} * 2 + which) * params.heads + head) *
                              (std::int64_t{params.columns} * 2);
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

// The largest finite magnitude of 8 elements, as the bits of an f32.
template <DType kType>
__device__ __forceinline__ std::uint32_t largest_of(const uint4& words, std::uint32_t largest) {
  const std::uint32_t all[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack_pair<kType>(all[i]);
    for (const float value : {pair.x, pair.y}) {
      const std::uint32_t bits = __float_as_uint(value) & 0x7fffffffu;
      if (bits < 0x7f800000u) largest = max(largest, bits);
    }
  }
  return largest;
}

// The dot product of 8 elements with 8 others, in their order.
template <DType kType>
__device__ __forceinline__ float dot_of(const uint4& a, const uint4& b) {
  const std::uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 left = unpack_pair<kType>(x[i]), right = unpack_pair<kType>(y[i]);
    sum = fmaf(left.y, right.y, fmaf(left.x, right.x, sum));
  }
  return sum;
}

__device__ __forceinline__ void raise_bound(std::uint32_t* bound, std::uint32_t largest, int lane) {
  largest = __reduce_max_sync(kFullWarp, largest);
  if (lane == 0 && largest > 0) atomicMax(bound, largest);
}

// A block has a query; a warp every eighth of its heads.
template <DType kType, int kDim, bool kFixed>
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
          delta += dot_of<kType>(__ldg(reinterpret_cast<const uint4*>(out) + unit + lane),
                                 __ldg(reinterpret_cast<const uint4*>(d_out) + unit + lane));
        }
        delta = warp_sum(delta);
      }
      if constexpr (kFixed) {
        const char* const q = params.q + query * params.q_stride0 + head * params.q_stride1;
        for (int unit = lane; unit < kDim / 8; unit += 32) {
          largest_q = largest_of<kType>(__ldg(reinterpret_cast<const uint4*>(q) + unit), largest_q);
        }
        for (int unit = lane; unit < kValueColumns / 8; unit += 32) {
          largest_d_out =
              largest_of<kType>(__ldg(reinterpret_cast<const uint4*>(d_out) + unit), largest_d_out);
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
template <DType kType>
__global__ void __launch_bounds__(kThreads)
    bound_rows_kernel(const char* kv, std::int64_t stride, std::int64_t count, int units,
                      const std::uint32_t* seen, Bounds* bounds) {
  const std::int64_t row = blockIdx.x * std::int64_t{kWarps} + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= count || seen[row] == 0) return;
  std::uint32_t largest = 0;
  for (int unit = lane; unit < units; unit += 32) {
    largest =
        largest_of<kType>(__ldg(reinterpret_cast<const uint4*>(kv + row * stride) + unit), largest);
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

// --- a segment of a query -----------------------------------------------------------------------

struct ListMemory {
  std::int32_t rows[kSegment];  // the row of each entry; -1: nothing is seen there
  std::int32_t limits[4];       // of the query
  std::int32_t next[1];         // the number of the block's next query
  std::int32_t query[1], tiles[1];
};
struct alignas(kTileLine) PaddedListMemory : ListMemory {};
struct ListPlan : Shared<ListMemory> {
  WINNOW_PLACE(rows)
  WINNOW_PLACE(limits)
  WINNOW_PLACE(next)
  WINNOW_PLACE(query)
  WINNOW_PLACE(tiles)
};

// The number of the thread, which the compiler takes for another one in each phase: else it keeps
// what follows from it in registers, from phase to phase, and spills.
__device__ __forceinline__ int phase_thread() {
  return __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x), threadIdx.x % 32);
}

// What a phase knows. It asks shared memory again, since no register is left from phase to phase.
struct Segment {
  ListPlan list;
  std::int64_t query;
  int tiles;         // of the segment
  bool first, last;  // of the query

  __device__ __forceinline__ std::int32_t row(int entry) const { return list.rows()[entry].load(); }
};
__device__ __forceinline__ Segment segment_at(ListPlan list, int first_tile) {
  const int behind = list.tiles()[0].load() - first_tile;
  return {list, list.query()[0].load(), min(behind, kSegmentTiles), first_tile == 0,
          behind <= kSegmentTiles};
}

// Names the rows of a segment, of whole groups of tiles, and says how many tiles the query has.
__device__ __forceinline__ void number_rows(const KernelParams& params, ListPlan list,
                                            int first_tile) {
  const int thread = phase_thread(), warp = thread / 32, lane = thread % 32;
  const QueryTiles<kRows> entries(params.sources, list.query()[0].load(),
                                  list.limits()[lane & 3].load());
  if (thread == 0 && first_tile == 0) list.tiles()[0].store(entries.tiles());
  const int tiles = min(entries.tiles() - first_tile, kSegmentTiles);
  const int all = ceil_div(tiles, kGroupTiles) * kGroupTiles;
  for (int tile = warp; tile < all; tile += kWarps) {
    const int at = first_tile + tile;
    const std::int32_t entry = tile < tiles ? entries.load(at, lane) : -1;
    const bool visible = tile < tiles && is_visible(entries, at, entry);
    const auto row = static_cast<std::int32_t>(row_number(params, entries, at, entry));
    list.rows()[kRows * tile + lane].store(visible ? row : -1);
  }
}

// Where a row begins.
__device__ __forceinline__ const char* row_at(const KernelParams& params, std::int32_t row) {
  const bool second = row >= params.first_rows;
  const GatherView& source = params.sources.source[second].rows;
  return source.kv + (row - (second ? params.first_rows : 0)) * source.kv_stride;
}

// --- P and dS -----------------------------------------------------------------------------------

// The sums of a block of 16 heads and 16 entries, as the lanes of a warp have them.
struct BlockSums {
  float lanes[2][32][4];
};
template <int kDim, int kParts>
struct ScoresMemory {
  Tile<kRows, kDim> rows[2];
  // Of the logits and of dP: what the warps add up that have a part of the columns each. A warp
  // gets those of its block from the others.
  BlockSums sums[2][kWarps][kParts - 1];
};
// Warps have a kParts-th of the columns of Q and dO for kBlocks blocks of 16 heads, in registers.
// Of the sums of kBlocks blocks of heads and two of entries each of kParts warps has one block.
template <DType kType_, int kDim_, int kParts_>
struct ScoresPlan : Shared<ScoresMemory<kDim_, kParts_>> {
  static constexpr DType kType = kType_;
  using Memory = ScoresMemory<kDim_, kParts_>;
  static constexpr int kDim = kDim_, kParts = kParts_;
  static constexpr int kBlocks = kHeads / 16 * kParts / kWarps;
  static_assert(2 * kBlocks == kParts);
  WINNOW_PLACE(rows)
  WINNOW_PLACE(sums)
};

// The place of a warp: the heads that it has parts of, and its own block of sums.
template <int kParts>
struct ScoresWarp {
  int warp, lane;
  __device__ __forceinline__ int part() const { return warp % kParts; }
  // The blocks of heads and of entries are counted from its own on: block 0 is its own.
  __device__ __forceinline__ int head(int block) const {
    return warp / kParts * 8 * kParts + 16 * (block ^ part() / 2);
  }
  __device__ __forceinline__ int entry(int block) const { return 16 * (block ^ part() % 2); }
};

// Loads the warp's part of Q or dO. `heads` is where the item's first head begins, `count` (up to
// 64) those that exist; stride counts bytes. Step s are the columns from 16 (kParts s + part) on.
template <int kParts, int kBlocks, int kSteps>
__device__ __forceinline__ void load_part(const char* heads, std::int64_t stride, int count,
                                          const ScoresWarp<kParts>& at,
                                          std::uint32_t (&q)[kBlocks][kSteps][4]) {
  const int quad = at.lane % 4;
#pragma unroll
  for (int m = 0; m < kBlocks; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int head = at.head(m) + at.lane / 4 + 8 * r;
      // Lanes of a quad load four units of 8 columns, and each takes a pair of every unit.
      const char* const from =
          heads + (head < count ? head : 0) * stride + (16 * at.part() + 8 * (quad % 2)) * 2;
#pragma unroll
      for (int s = 0; s < kSteps; s += 2) {
        const int mine = s + quad / 2;
        uint4 words = {};
        if (head < count && mine < kSteps) {
          words = __ldg(reinterpret_cast<const uint4*>(from + 16 * kParts * mine * 2));
        }
        std::uint32_t w[4] = {words.x, words.y, words.z, words.w};
        quad_transpose(w, at.lane);
        q[m][s][r] = w[0];
        q[m][s][r + 2] = w[1];
        if (s + 1 < kSteps) {
          q[m][s + 1][r] = w[2];
          q[m][s + 1][r + 2] = w[3];
        }
      }
    }
  }
}

// The warp's part of the sums of a tile: of its own block to `mine`, of the others to their warps.
// between(step), for all steps but the last, is done while the products before it run.
template <class P, int kSteps, class Between>
__device__ __forceinline__ void multiply_part(P shared, int slot, int which,
                                              const ScoresWarp<P::kParts>& at,
                                              const std::uint32_t (&q)[P::kBlocks][kSteps][4],
                                              float (&mine)[2][4], const Between& between) {
  float s[P::kBlocks][2][2][4] = {};
  auto first = shared.rows()[slot].squares_of_b(at.lane);
  first.lane ^= at.part() * 2 * kUnitBytes;
  auto second = first;
  first.lane += at.entry(0) * kTileLine;
  second.lane += at.entry(1) * kTileLine;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    std::uint32_t b[2][4];
    ldmatrix_x4(first.at(0, P::kParts * step), b[0][0], b[0][1], b[0][2], b[0][3]);
    ldmatrix_x4(second.at(0, P::kParts * step), b[1][0], b[1][1], b[1][2], b[1][3]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int m = 0; m < P::kBlocks; ++m) {
        mma_m16n8k16<P::kType>(s[m][half][0], q[m][step], b[half][0], b[half][1]);
        mma_m16n8k16<P::kType>(s[m][half][1], q[m][step], b[half][2], b[half][3]);
      }
    }
    if (step + 1 < kSteps) between(step);
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int other = 1; other < P::kParts; ++other) {
      const auto& d = s[other / 2][other % 2][n];
      const auto to = shared.sums()[which][at.warp ^ other][other - 1].address;
      st_shared(to + (32 * n + at.lane) * 16,
                make_uint4(__float_as_uint(d[0]), __float_as_uint(d[1]), __float_as_uint(d[2]),
                           __float_as_uint(d[3])));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) mine[n][i] = s[0][0][n][i];
  }
}

// Adds the sums of the other warps, always in the same order.
template <class P>
__device__ __forceinline__ void add_parts(P shared, int which, const ScoresWarp<P::kParts>& at,
                                          float (&mine)[2][4]) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int other = 1; other < P::kParts; ++other) {
      const uint4 words = ld_shared_words(shared.sums()[which][at.warp][other - 1].address +
                                          (32 * n + at.lane) * 16);
      mine[n][0] += __uint_as_float(words.x);
      mine[n][1] += __uint_as_float(words.y);
      mine[n][2] += __uint_as_float(words.z);
      mine[n][3] += __uint_as_float(words.w);
    }
  }
}

template <class P>
__device__ __forceinline__ void write_scores(const KernelParams& params, ListPlan list,
                                             int first_tile, P shared, int first) {
  const Segment segment = segment_at(list, first_tile);
  const int thread = phase_thread(), warp = thread / 32, lane = thread % 32;
  const ScoresWarp<P::kParts> at{warp, lane};
  const int heads = min(params.h_q - first, kHeads);
  const int tiles = ceil_div(segment.tiles, kGroupTiles) * kGroupTiles;
  const std::uint64_t policy = policy_evict_last();
  const auto copy = [&](int tile) {
    if (tile < tiles) {
      const int entry = 4 * warp + lane / 8, unit = lane % 8;
      const std::int32_t row = segment.row(kRows * tile + entry);
      const char* const from = row_at(params, max(row, 0)) + unit * kUnitBytes;
      const std::uint32_t to = in_one_register(shared.rows()[tile & 1].unit(entry, unit), lane);
#pragma unroll
      for (int chunk = 0; chunk < P::kDim / 64; ++chunk) {
        cp_async_zfill<128>(to + chunk * Tile<kRows, P::kDim>::kChunkBytes,
                            from + chunk * kTileLine, row >= 0, policy);
      }
    }
    cp_async_commit();
  };
  copy(0);
  copy(1);

  // Of the lane's heads. An array would lie in local memory.
  const std::int64_t state = segment.query * params.heads + first + at.head(0) + lane / 4;
  const float2 upper = {params.lse2[state], params.deltas[state]};
  const float2 lower = {params.lse2[state + 8], params.deltas[state + 8]};
  const float scale2 = params.scale * kLog2e;
  std::uint32_t q[P::kBlocks][P::kDim / 16 / P::kParts][4];
  load_part(params.q + segment.query * params.q_stride0 + first * params.q_stride1,
            params.q_stride1, heads, at, q);
  std::uint32_t d_out[P::kBlocks][kValueColumns / 16 / P::kParts][4];
  load_part(params.d_out + segment.query * params.d_out_stride0 + first * params.d_out_stride1,
            params.d_out_stride1, heads, at, d_out);

  cp_async_wait<1>();  // of the first rows
  __syncthreads();     // they are there
  float logits[2][4], d_p[2][4];
  multiply_part(shared, 0, 0, at, q, logits, [](int) {});
  // Two lanes have four entries of each of two blocks of 8 columns, and share them out.
  char* const weights = weights_at(params, 0, first + at.head(0) + lane / 4) +
                        (at.entry(0) + lane % 2 * 8 + lane % 4 / 2 * 4) * 2;
  for (int tile = 0; tile < tiles; ++tile) {
    __syncthreads();  // the logits are there, and dP of the tile before is done with
    multiply_part(shared, tile & 1, 1, at, d_out, d_p, [&](int step) {
      if (step == 0) add_parts(shared, 0, at, logits);
    });
    cp_async_wait<0>();  // of the next rows
    __syncthreads();     // dP and the next tile are there; this tile and the logits are done with
    std::uint32_t p_words[2][2], d_s_words[2][2];  // rows r, blocks of 8 columns
    constexpr int kParts = 5;
    const auto weigh = [&](int part) {
      if (part == 0) copy(tile + 2);
      if (part == 1) add_parts(shared, 1, at, d_p);
      if (part == 2 || part == 3) {
        const int n = part - 2;
        const auto rows = ld_shared<std::uint64_t>(
            segment.list.rows()[kRows * tile + at.entry(0) + 8 * n + lane % 4 * 2].address);
        const bool seen[2] = {static_cast<std::int32_t>(rows) >= 0,
                              static_cast<std::int64_t>(rows) >= 0};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float lse2 = r == 0 ? upper.x : lower.x, delta = r == 0 ? upper.y : lower.y;
          float p[2], d_s[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const bool counts = lse2 != infinity() && seen[e];
            p[e] = counts ? ex2(fmaf(logits[n][2 * r + e], scale2, -lse2)) : 0.0f;
            d_s[e] = counts ? p[e] * (d_p[n][2 * r + e] - delta) * params.scale : 0.0f;
          }
          p_words[r][n] = pack_pair<P::kType>(p[0], p[1]);
          d_s_words[r][n] = pack_pair<P::kType>(d_s[0], d_s[1]);
        }
      }
      if (part == 4) {
        const bool odd = lane & 1;
        const auto store = [&](int which, int r, const std::uint32_t(&words)[2]) {
          const std::uint32_t got = __shfl_xor_sync(kFullWarp, odd ? words[0] : words[1], 1);
          const std::int64_t row = std::int64_t{params.heads} * which + 8 * r;
          *reinterpret_cast<uint2*>(weights + (row * params.columns + kRows * tile) * 2) =
              odd ? make_uint2(got, words[1]) : make_uint2(words[0], got);
        };
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          store(0, r, p_words[r]);
          store(1, r, d_s_words[r]);
        }
      }
    };
    if (tile + 1 < tiles) {
      float next[2][4];
      multiply_part(shared, (tile + 1) & 1, 0, at, q, next, weigh);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) logits[n][i] = next[n][i];
      }
    } else {
#pragma unroll
      for (int part = 0; part < kParts; ++part) weigh(part);
    }
  }
}

// --- dq -----------------------------------------------------------------------------------------

// kWide: 128 heads and half of the columns, 32 of each 64; else 64 heads and all columns. Eight
// warps have 64 heads and a quarter or an eighth of the columns each: of every 64 columns a block
// of 8, which stands behind those of the warps before it.
template <int kDim, bool kWide, int kSlots>
struct DqMemory {
  // Half of 9 chunks of 64 columns takes 5.
  Tile<kRows, kWide ? ceil_div(kDim, 128) * 64 : kDim> rows[kSlots];
  Tile<kHeads, 64> weights[kSlots];  // dS: 64 heads in half of the columns, 64 in the other
};
// kStepTiles: between two barriers.
template <DType kType_, int kDim_, bool kWide_, int kSlots_, int kStepTiles_ = 1>
struct DqPlan : Shared<DqMemory<kDim_, kWide_, kSlots_>> {
  static constexpr DType kType = kType_;
  using Memory = DqMemory<kDim_, kWide_, kSlots_>;
  static constexpr int kDim = kDim_, kSlots = kSlots_, kStepTiles = kStepTiles_;
  static_assert(kSlots % kStepTiles == 0 && kGroupTiles % kStepTiles == 0);
  static constexpr bool kWide = kWide_;
  WINNOW_PLACE(rows)
  WINNOW_PLACE(weights)
};

template <class P>
__device__ __forceinline__ void multiply_dq(const KernelParams& params, ListPlan list,
                                            int first_tile, P shared, int first, int half) {
  const Segment segment = segment_at(list, first_tile);
  constexpr bool kWide = P::kWide;
  constexpr int kDim = P::kDim, kBlocks = kDim / 64, kWarpBlocks = kWide ? 4 : 8;
  const int thread = phase_thread(), warp = thread / 32, lane = thread % 32;
  const int warp_m = kWide ? warp / 4 : 0, warp_n = warp % kWarpBlocks;
  const int tiles = ceil_div(segment.tiles, P::kStepTiles) * P::kStepTiles;
  const std::uint64_t policy = policy_evict_last();
  const auto copy_tile = [&](int tile) {
    const int slot = tile % P::kSlots;
    const int at = 4 * warp + lane / 8, unit = lane % 8;
    const std::int32_t row = segment.row(kRows * tile + at);
    const int column = kWide ? unit / 4 * 64 + half * 32 + unit % 4 * 8 : 8 * unit;
    const char* const from = row_at(params, max(row, 0)) + 2 * column;
    const auto rows = shared.rows()[slot];
    const std::uint32_t to = in_one_register(rows.unit(at, unit), lane);
#pragma unroll
    for (int n = 0; n < (kWide ? ceil_div(kBlocks, 2) : kBlocks); ++n) {
      if (kWide && 2 * n + unit / 4 >= kBlocks) continue;
      cp_async_zfill<128>(to + n * decltype(rows)::Type::kChunkBytes,
                          from + n * (kWide ? 2 : 1) * kTileLine, row >= 0, policy);
    }
    const int head = thread / 4;
#pragma unroll
    for (int m = 0; m < (kWide ? 2 : 1); ++m) {
      const int piece = thread % 4;
      cp_async_zfill<128>(
          in_one_register(shared.weights()[slot].unit(head, 4 * m + piece), lane),
          weights_at(params, 1, first + 64 * m + head) + (kRows * tile + 8 * piece) * 2, true,
          policy);
    }
  };
  const auto copy = [&](int tile) {
    if (tile < tiles) {
#pragma unroll 1  // each address alone takes registers enough
      for (int t = 0; t < P::kStepTiles; ++t) copy_tile(tile + t);
    }
    cp_async_commit();
  };
#pragma unroll
  for (int tile = 0; tile < P::kSlots - P::kStepTiles; tile += P::kStepTiles) copy(tile);

  // Where the lane has its part of dq of the segments before.
  const auto sums_at = [&](int m, int r, int n) {
    const int head = first + 64 * warp_m + 16 * m + lane / 4 + 8 * r;
    const int column = 64 * n + (kWide ? 32 * half : 0) + 8 * warp_n + lane % 4 * 2;
    return reinterpret_cast<float2*>(
        params.dq_sums + (std::int64_t{blockIdx.x} * params.heads + head) * kDim + column);
  };
  float d[kHeads / 16][kBlocks][4] = {};
  if (!segment.first) {
#pragma unroll
    for (int m = 0; m < kHeads / 16; ++m) {
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        const float2 upper = *sums_at(m, 0, n), lower = *sums_at(m, 1, n);
        d[m][n][0] = upper.x;
        d[m][n][1] = upper.y;
        d[m][n][2] = lower.x;
        d[m][n][3] = lower.y;
      }
    }
  }
  for (int tile = 0; tile < tiles; tile += P::kStepTiles) {
    cp_async_wait<P::kSlots / P::kStepTiles - 2>();  // of rows and dS
    __syncthreads();  // the tiles are there, and those before are done with
#pragma unroll 1
    for (int t = 0; t < P::kStepTiles; ++t) {
      const int slot = (tile + t) % P::kSlots;
      const auto weights = shared.weights()[slot].squares(lane);
      const auto rows = shared.rows()[slot];
      std::uint32_t a[kHeads / 16][kRows / 16][4];
#pragma unroll
      for (int m = 0; m < kHeads / 16; ++m) {
#pragma unroll
        for (int k16 = 0; k16 < kRows / 16; ++k16) {
          ldmatrix_x4(weights.at(m, 2 * warp_m + k16), a[m][k16][0], a[m][k16][1], a[m][k16][2],
                      a[m][k16][3]);
        }
      }
      const std::uint32_t column = rows.unit(lane, warp_n);
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        constexpr int kChunkBytes = decltype(rows)::Type::kChunkBytes;
        std::uint32_t b[4];  // the block's columns of all 32 rows
        ldmatrix_x4_trans(kWide ? (column ^ n % 2 * 4 * kUnitBytes) + n / 2 * kChunkBytes
                                : column + n * kChunkBytes,
                          b[0], b[1], b[2], b[3]);
#pragma unroll
        for (int m = 0; m < kHeads / 16; ++m) {
          mma_m16n8k16<P::kType>(d[m][n], a[m][0], b[0], b[1]);
          mma_m16n8k16<P::kType>(d[m][n], a[m][1], b[2], b[3]);
        }
        if (t == 0 && n == 0) copy(tile + P::kSlots - P::kStepTiles);  // while the products run
      }
    }
  }
  __syncthreads();  // the last tile is done with
#pragma unroll
  for (int m = 0; m < kHeads / 16; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int head = first + 64 * warp_m + 16 * m + lane / 4 + 8 * r;
      if (!segment.last) {
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
          *sums_at(m, r, n) = make_float2(d[m][n][2 * r], d[m][n][2 * r + 1]);
        }
        continue;
      }
      if (head >= params.h_q) continue;
      // 0 times an infinity of a row is no part of a dead head's gradient.
      const bool dead = params.lse2[segment.query * params.heads + head] == infinity();
      char* const to = params.dq + segment.query * params.dq_stride0 + head * params.dq_stride1;
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        const int column = 64 * n + (kWide ? 32 * half : 0) + 8 * warp_n + lane % 4 * 2;
        const float x = dead ? 0.0f : d[m][n][2 * r], y = dead ? 0.0f : d[m][n][2 * r + 1];
        if (params.dq_f32) {
          *reinterpret_cast<float2*>(to + 4 * column) = make_float2(x, y);
        } else {
          *reinterpret_cast<std::uint32_t*>(to + 2 * column) = pack_pair<P::kType>(x, y);
        }
      }
    }
  }
}

// --- dkv ----------------------------------------------------------------------------------------

// A job is 128 entries and half of the columns, 32 of each 64. Warps have 64 entries and of every
// 32 columns a block of 8.
template <int kDim, int kStepHeads>
struct DkvStep {
  // Half of dO in the first 256 columns, half of Q behind it.
  Tile<kStepHeads, kDim> heads;
  Tile<kStepHeads, kGroupRows> weights[2];  // P, dS
};
template <int kDim_, int kStepHeads_>
struct DkvStepPlan : Shared<DkvStep<kDim_, kStepHeads_>> {
  using Memory = DkvStep<kDim_, kStepHeads_>;
  static constexpr int kDim = kDim_, kStepHeads = kStepHeads_;
  WINNOW_PLACE(heads)
  WINNOW_PLACE(weights)
};
// Sums of 64 entries and 32 columns of each half of the warps, on their way to the rows.
struct DkvSums {
  float sums[2][kGroupRows / 2][32];
};
template <int kDim, int kStepHeads>
struct DkvMemory {
  DkvStep<kDim, kStepHeads> steps[2];
  DkvSums sums[2];
};
template <DType kType_, int kDim_, int kStepHeads_>
struct DkvPlan : Shared<DkvMemory<kDim_, kStepHeads_>> {
  static constexpr DType kType = kType_;
  using Memory = DkvMemory<kDim_, kStepHeads_>;
  using Step = DkvStepPlan<kDim_, kStepHeads_>;
  static constexpr int kDim = kDim_, kStepHeads = kStepHeads_;
  WINNOW_PLACE(steps)
  WINNOW_PLACE(sums)
};

// Starts the copies of a step of a job. What a dead head has becomes zeros; `lives` says of the
// thread's heads, every 16th of the step, which are not.
template <class Step>
__device__ __forceinline__ void copy_step(const KernelParams& params, const Segment& segment,
                                          Step shared, int job, int step, std::uint32_t lives) {
  const std::uint64_t policy = policy_evict_last();
  const int thread = phase_thread(), lane = thread % 16;
  const int column = lane / 4 * 64 + job % 2 * 32 + lane % 4 * 8;  // of four blocks of 64
  constexpr int kBlockBytes = 4 * 64 * 2;
#pragma unroll 1  // each address alone takes registers enough
  for (int r = 0; r < Step::kStepHeads / 16; ++r) {
    const int row = 16 * r + thread / 16, head = Step::kStepHeads * step + row;
    const bool alive = lives >> r & 1;
    const int mine = alive ? head : 0;
    const char* const q =
        params.q + segment.query * params.q_stride0 + mine * params.q_stride1 + 2 * column;
    const char* const d_out = params.d_out + segment.query * params.d_out_stride0 +
                              mine * params.d_out_stride1 + 2 * column;
#pragma unroll
    for (int i = 0; i < kValueColumns / 256; ++i) {
      cp_async_zfill<128>(shared.heads().unit(row, 16 * i + lane), d_out + i * kBlockBytes, alive,
                          policy);
    }
#pragma unroll
    for (int i = 0; i < ceil_div(Step::kDim, 256); ++i) {
      if (4 * i + lane / 4 >= Step::kDim / 64) continue;
      cp_async_zfill<128>(shared.heads().unit(row, kValueColumns / 16 + 16 * i + lane),
                          q + i * kBlockBytes, alive, policy);
    }
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      cp_async_zfill<128>(shared.weights()[which].unit(row, lane),
                          weights_at(params, which, head) + (job / 2 * kGroupRows + 8 * lane) * 2,
                          true, policy);
    }
  }
}

// Where a sum of 32 columns stands: blocks of 8 columns of four rows lie in different banks.
__device__ __forceinline__ std::uint32_t sum_offset(int row, int column) {
  return static_cast<std::uint32_t>(row * 32 + ((column / 8 ^ (row & 3)) * 8 + column % 8)) * 4;
}

template <bool kFixed, class P>
__device__ __forceinline__ void multiply_dkv(const KernelParams& params, ListPlan list,
                                             int first_tile, P shared) {
  const Segment segment = segment_at(list, first_tile);
  constexpr int kDim = P::kDim, kBlocks = kDim / 64, kStepHeads = P::kStepHeads;
  const int thread = phase_thread(), warp = thread / 32, lane = thread % 32;
  const int warp_m = warp / 4, warp_n = warp % 4;
  const int steps = ceil_div(params.h_q, kStepHeads);
  const int jobs = ceil_div(segment.tiles, kGroupTiles) * 2;
  const float units = kFixed ? units_of(params) : 0.0f;

  // Which of the thread's heads of a step live is loaded a step before its copies begin.
  const auto load_lives = [&](int step) {
    std::uint32_t lives = 0;
#pragma unroll
    for (int r = 0; r < kStepHeads / 16; ++r) {
      const int head = kStepHeads * step + 16 * r + thread / 16;
      if (params.lse2[segment.query * params.heads + head] != infinity()) lives |= 1u << r;
    }
    return lives;
  };
  const auto step_behind = [&](int step) { return step + 1 < steps ? step + 1 : 0; };
  const auto copy = [&](int slot, int job, int step, std::uint32_t lives) {
    if (job < jobs) {
      copy_step(params, segment, typename P::Step{shared.steps()[slot].address}, job, step, lives);
    }
    cp_async_commit();
    return load_lives(step_behind(step));
  };
  std::uint32_t lives = copy(0, 0, 0, load_lives(0));
  int slot = 0;
  for (int job = 0; job < jobs; ++job) {
    float d[kGroupRows / 2 / 16][kBlocks][4] = {};
    for (int step = 0; step < steps; ++step, slot ^= 1) {
      cp_async_wait<0>();  // of the step
      __syncthreads();     // the step is there, and the step before is done with
      const typename P::Step here{shared.steps()[slot].address};
      // The warps' entries are a chunk of 64 columns.
      auto p_squares = here.weights()[0].squares_of_b(lane);
      p_squares.lane += warp_m * Tile<kStepHeads, kGroupRows>::kChunkBytes;
      constexpr int kDsBytes = sizeof(Tile<kStepHeads, kGroupRows>);  // from P to dS
      constexpr int kChunkBytes = Tile<kStepHeads, kDim>::kChunkBytes;
      constexpr int kQueries = kValueColumns / 2 / 64 * kChunkBytes;  // where Q begins
      const std::uint32_t column = here.heads().unit(lane % 16, warp_n);
      // Half of the lanes name rows of Q, the others those of dO.
      const std::uint32_t either = column + (lane < 16 ? kQueries : 0);
#pragma unroll
      for (int k16 = 0; k16 < kStepHeads / 16; ++k16) {
        if (k16 == kStepHeads / 16 - 1) {  // the products before run
          const int behind = step_behind(step);
          lives = copy(slot ^ 1, behind == 0 ? job + 1 : job, behind, lives);
        }
        std::uint32_t p[kGroupRows / 2 / 16][4], d_s[kGroupRows / 2 / 16][4];
#pragma unroll
        for (int m = 0; m < kGroupRows / 2 / 16; ++m) {
          const std::uint32_t at = p_squares.at(k16, m);
          ldmatrix_x4_trans(at, p[m][0], p[m][1], p[m][2], p[m][3]);
          ldmatrix_x4_trans(at + kDsBytes, d_s[m][0], d_s[m][1], d_s[m][2], d_s[m][3]);
        }
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
          const bool has_value = n < kValueColumns / 64;
          std::uint32_t b[4];
          ldmatrix_x4_trans(((has_value ? either : column + kQueries) ^ n % 2 * 4 * kUnitBytes) +
                                n / 2 * kChunkBytes + k16 * kSquareRows * kTileLine,
                            b[0], b[1], b[2], b[3]);
#pragma unroll
          for (int m = 0; m < kGroupRows / 2 / 16; ++m) {
            mma_m16n8k16<P::kType>(d[m][n], d_s[m], b[0], b[1]);
            if (has_value) mma_m16n8k16<P::kType>(d[m][n], p[m], b[2], b[3]);
          }
        }
      }
    }

    // 32 columns of a row at once, 128 bytes: through shared memory.
    const int adder = phase_thread(), to_lane = adder % 32, to_n = adder / 32 % 4;
    const std::uint32_t half = adder / 128 * static_cast<std::uint32_t>(sizeof(DkvSums) / 2);
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const std::uint32_t sums = shared.sums()[n & 1].address + half;
#pragma unroll
      for (int m = 0; m < kGroupRows / 2 / 16; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const std::uint64_t high = __float_as_uint(d[m][n][2 * r + 1]);
          st_shared(sums + sum_offset(16 * m + to_lane / 4 + 8 * r, 8 * to_n + to_lane % 4 * 2),
                    high << 32 | __float_as_uint(d[m][n][2 * r]));
        }
      }
      __syncthreads();  // the sums are there
      const int column = 64 * n + job % 2 * 32 + to_lane;
      float x[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        x[i] = ld_shared<float>(sums + sum_offset(16 * to_n + i, to_lane));
      }
#pragma unroll
      for (int i = 0; i < 16; i += 4) {
        const uint4 words = ld_shared_words(
            segment.list.rows()[job / 2 * kGroupRows + 16 * (adder / 32) + i].address);
        const std::uint32_t rows[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const auto row = static_cast<std::int32_t>(rows[e]);
          const std::int64_t to = std::int64_t{row} * kDim + column;
          if constexpr (kFixed) {
            if (row >= 0 && !(fabsf(x[i + e]) < infinity())) params.rows[row] = 2;
            const auto integer = static_cast<unsigned long long>(__float2ll_rn(x[i + e] * units));
            if (row >= 0) reduce_add(static_cast<unsigned long long*>(params.sums) + to, integer);
          } else {
            if (row >= 0) reduce_add(static_cast<float*>(params.sums) + to, x[i + e]);
          }
        }
      }
    }
  }
}

// --- all ----------------------------------------------------------------------------------------

// kLarge: where a block has 148 KiB of shared memory instead of 99.
template <DType kType, int kDim, bool kLarge>
struct Phases {
  using Scores = ScoresPlan<kType, kDim, kLarge ? 4 : 2>;
  using Dq = DqPlan<kType, kDim, false, kLarge ? 3 : 2>;
  using WideDq = DqPlan<kType, kDim, true, kLarge ? 4 : 3, kLarge ? 2 : 1>;
  using Dkv = DkvPlan<kType, kDim, kLarge ? 32 : 16>;
  union Memory {
    typename Scores::Memory scores;
    typename Dq::Memory dq;
    typename WideDq::Memory wide_dq;
    typename Dkv::Memory dkv;
  };
  static constexpr int kBytes = sizeof(PaddedListMemory) + sizeof(Memory);
};

template <class P, bool kFixed>
__global__ void __launch_bounds__(kThreads, 1)
    products_kernel(const __grid_constant__ KernelParams params) {
  const ListPlan list{shared_address(dynamic_shared<128>())};
  const std::uint32_t base = list.base + sizeof(PaddedListMemory);
  for (std::int64_t number = blockIdx.x; number < params.s_q; number = list.next()[0].load()) {
    if (threadIdx.x < 4) {
      // The last ones first: of causal ones they see the most.
      const std::int64_t query = params.s_q - 1 - number;
      const int lane = threadIdx.x;
      list.limits()[lane].store(load_limits(params.sources, query, lane));
      if (lane == 0) list.query()[0].store(static_cast<std::int32_t>(query));
    }
    __syncthreads();  // the query is named, and the number is read
    if (threadIdx.x == 0) {
      list.next()[0].store(static_cast<std::int32_t>(gridDim.x + atomicAdd(params.taken, 1u)));
    }
    int first_tile = 0;
    do {
      number_rows(params, list, first_tile);
      __syncthreads();  // the rows are named
      if (list.tiles()[0].load() > 0) {
        for (int head = 0; head < params.heads; head += kHeads) {
          write_scores(params, list, first_tile, typename P::Scores{base}, head);
          __syncthreads();  // P and dS are there
        }
      }
      for (int head = 0; head < params.heads; head += kHeads) {
        if (params.heads % (2 * kHeads) == 0) {
          multiply_dq(params, list, first_tile, typename P::WideDq{base},
                      head / (2 * kHeads) * 2 * kHeads, head / kHeads % 2);
        } else {
          multiply_dq(params, list, first_tile, typename P::Dq{base}, head, 0);
        }
      }
      multiply_dkv<kFixed>(params, list, first_tile, typename P::Dkv{base});
      __syncthreads();  // the rows are done with
      first_tile += kSegmentTiles;
    } while (first_tile < list.tiles()[0].load());
  }
}

// --- after --------------------------------------------------------------------------------------

// dkv of `count` rows from `first` on in its dtype, f32 or that of q. A thread has an element.
template <DType kType, bool kFixed>
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
        static_cast<std::uint16_t>(pack_pair<kType>(x, 0.0f));
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
