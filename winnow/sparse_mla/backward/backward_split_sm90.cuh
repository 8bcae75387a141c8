// Backward of top-k sparse MLA attention, sm90, for many heads: what the four kernels share, and
// the first two of them.
//
// The gradient of a cache row sums over all heads of all queries that chose it, and it is the
// reductions into memory that limit the speed. So P and dS of a chunk of queries go through memory
// as bf16 matrices: after that a block can hold the heads of a whole group of 128, sum over them in
// the tensor core, and reduce once.
//
//   prepare  per query: the visible entries of its lists, in order of key ranges; lse of its heads
//   scores   delta = d_out.out, unless it is given
//            P = exp(scale q.k - lse), dS = scale P (d_out.k - delta)             -> scratch
//   dq       dq = dS K                                  (backward_split_products_sm90.cuh)
//   dkv      dkv += P^T d_out + dS^T q, tile by tile    (the same; backward_split_drain_sm90.cuh)
//
// prepare drops the entries that a query does not see; the other kernels know only lists of rows
// that count and their lengths. A tile is 64 consecutive entries of such a list.
#pragma once

#include <cstddef>
#include <cstdint>

#include "winnow/device/common/math.cuh"
#include "winnow/device/common/memory.cuh"
#include "winnow/device/common/shared.cuh"
#include "winnow/device/common/warp.cuh"
#include "winnow/device/sm90/barrier.cuh"
#include "winnow/device/sm90/copy.cuh"
#include "winnow/device/sm90/pipeline.cuh"
#include "winnow/device/sm90/places.cuh"
#include "winnow/device/sm90/wgmma.cuh"
#include "winnow/sparse_mla/backward/backward_fixed_sm90.cuh"
#include "winnow/sparse_mla/backward/backward_sources_sm90.cuh"
#include "winnow/sparse_mla/entry_order_sm90.cuh"
#include "winnow/sparse_mla/gather_sm90.cuh"

namespace winnow::sparse_mla::backward_split_detail {

using namespace winnow::device;
using namespace backward_fixed_detail;

// Heads come in blocks of 64, M of the matrix products; two blocks are a group, over which dkv sums
// before it reduces.
inline constexpr int kBlockHeads = 64;
inline constexpr int kValueColumns = 512;
inline constexpr int kValueChunks = kValueColumns / kChunkColumns;
inline constexpr int kMaxRanges = kOrderRanges;  // of keys
inline constexpr int kSharedLimit = 232448;
// The bytes of rows and heads that L2 fetches at a time. Rows of 1152 bytes begin at odd multiples
// of 128, too, so that fetches of 256 would bring parts of other rows: 1 % of the time, measured.
inline constexpr int kFetched = 128;
inline constexpr int kImagePair = 2 * kChunkBytes;  // P and dS of a block of heads and a tile

// How the items of dkv are taken: in the first `fixed` rounds each block has its own, the others go
// to the block that is ready first. Items from `whole` on are cut into `shares` parts.
struct DkvCut {
  int fixed, whole, shares;
};

// A chunk of queries, numbered from 0. Strides of q, out and d_out count bytes, others elements.
struct Params {
  GatherView chosen;  // the caller's entries
  GatherView rows;    // those that count: lists in scratch
  const char* q;
  std::int64_t q_stride0, q_stride1;
  const char* out;  // null where delta is given
  std::int64_t out_stride0, out_stride1;
  const char* d_out;
  std::int64_t d_out_stride0, d_out_stride1;
  const float* lse;
  std::int64_t lse_stride;
  const float* attn_sink;  // may be null
  std::int64_t attn_sink_stride;
  const float* given_delta;  // may be null
  std::int64_t given_delta_stride;

  // Scratch. Heads are padded to blocks of 64.
  std::int32_t* lists;    // [queries, 64 tiles]
  std::int32_t* offsets;  // [queries, ranges + 1]: where the entries of a range of keys begin
  float* lse2;            // [queries, 64 blocks]: base 2, with the sink; +inf: no gradient
  float* delta;           // [queries, 64 blocks]
  char* images;           // [queries, tiles, blocks, {P, dS}]: chunks of 64 heads x 64 entries
  unsigned* dkv_taken;    // how many items of dkv were taken after the fixed rounds

  char* dq;
  std::int64_t dq_stride0, dq_stride1;  // elements
  bool dq_f32;
  float* dkv;  // f32 sums, [s_kv, d_qk]
  std::int64_t dkv_stride;

  // Scratch of the deterministic mode (backward_split_drain_sm90.cuh).
  float* head_norms;          // [queries, blocks, 4 warps, {q, d_out}]: of 16 heads, the largest
                              // sum of the magnitudes in a column
  float* tile_norms;          // [queries, tiles, blocks, 4 warps, {P, dS}]: the largest magnitude
  unsigned* row_bounds;       // [s_kv], f32 bits
  unsigned* row_counts;       // [s_kv]
  RowState* row_states;       // [s_kv]
  unsigned long long* fixed;  // [s_kv, d_qk / 2], sums of two columns each
  // With the fused kernel, in the place of the norms (backward_bounds_sm90.cuh).
  float2* head_sizes;  // [queries, 64 blocks]: the largest of d_out and its length
  float* row_sizes;    // [s_kv]: the length of the row's values

  int queries, h_q, blocks, tiles, columns;
  int ranges, range_shift;  // key t is in range t >> range_shift
  bool keep_images;         // L2 has room for images between the reads of the two slices
  bool one_chunk;           // there are no other queries
  DkvCut dkv_cut;
  float scale, scale_log2;
};

__device__ __forceinline__ char* image_pair(const Params& p, int query, int tile, int block) {
  return p.images +
         ((static_cast<std::int64_t>(query) * p.tiles + tile) * p.blocks + block) * kImagePair;
}

// What a persistent block works on next: an item of the launch, or some of its tiles. Items go
// round the blocks, whole; those that do not fill a last round are cut into shares, and every block
// gets the same number of them, of one item or of two.
struct Turn {
  static constexpr int kShares = 32;  // of an item
  int item, begin, end;

  // Of an item of `tiles` tiles.
  __device__ __forceinline__ int begin_of(int tiles) const { return tiles * begin / kShares; }
  __device__ __forceinline__ int end_of(int tiles) const { return tiles * end / kShares; }
};

// False after the last one.
__device__ __forceinline__ bool block_turn(int items, int number, Turn& turn) {
  const int blocks = gridDim.x, block = blockIdx.x, rounds = items / blocks;
  turn = {number * blocks + block, 0, Turn::kShares};
  if (number < rounds) return true;
  const int shares = items % blocks * Turn::kShares;
  const int begin = shares * block / blocks, end = shares * (block + 1) / blocks;
  const int nth = begin / Turn::kShares + number - rounds;  // of the items that are cut
  turn.item = rounds * blocks + nth;
  turn.begin = max(begin - nth * Turn::kShares, 0);
  turn.end = min(end - nth * Turn::kShares, Turn::kShares);
  return turn.begin < turn.end;
}

// ---- Prepare -----------------------------------------------------------------------------------

inline constexpr int kPrepareThreads = 256;
inline constexpr int kPrepareWarps = kPrepareThreads / 32;

// The visible entries of a query, stably ordered by key range, and where each range begins.
template <class List>
__device__ __forceinline__ void select_entries(const Params& p, int query, const List& source) {
  WINNOW_BLOCK_SHARED(counts, int[kMaxRanges][kPrepareWarps]);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int entries = source.count();
  const std::uint32_t visible = source.visible();
  const auto load = source.loads();
  std::int32_t* list = p.lists + static_cast<std::int64_t>(query) * p.tiles * kTileRows;
  // Each warp has a part of the entries, the same in both passes.
  const int part = ceil_div(ceil_div(entries, kPrepareWarps), 32) * 32;
  const int begin = warp * part, end = min(entries, begin + part);

  counts[thread / kPrepareWarps][thread % kPrepareWarps] = 0;
  __syncthreads();
  const auto walk = [&](auto&& visit) {
    for (int first = begin; first < end; first += 32) {
      const std::int32_t index = first + lane < end ? load(first, lane) : -1;
      const bool counted = static_cast<std::uint32_t>(index) < visible;
      const LanesByRange lanes(index, counted, p.range_shift);
      visit(index, counted ? lanes.range() : -1, lanes.with(lanes.range()));
      __syncwarp();
    }
  };
  walk([&](int, int range, unsigned same) {
    if (range >= 0 && lane == __ffs(same) - 1) counts[range][warp] += __popc(same);
  });
  __syncthreads();
  if (warp == 0) {  // exclusive sums over ranges, and over warps within a range
    int total = 0;
    for (int w = 0; w < kPrepareWarps; ++w) total += counts[lane][w];
    int before = warp_prefix(total, lane) - total;
    std::int32_t* offsets = p.offsets + static_cast<std::int64_t>(query) * (p.ranges + 1);
    if (lane < p.ranges) offsets[lane] = before;
    if (lane == p.ranges - 1) offsets[lane + 1] = before + total;
    for (int w = 0; w < kPrepareWarps; ++w) {
      const int count = counts[lane][w];
      counts[lane][w] = before;
      before += count;
    }
  }
  __syncthreads();
  walk([&](int index, int range, unsigned same) {
    const int first = range >= 0 ? counts[range][warp] : 0;
    __syncwarp();
    if (range < 0) return;
    const int rank = __popc(same & ((1u << lane) - 1));
    // If the list is rewritten meanwhile, the counts may be wrong.
    if (first + rank < entries) list[first + rank] = index;
    if (rank == 0) counts[range][warp] = first + __popc(same);
  });
}

// The largest magnitude and the length of 512 bf16 values. NaN is largest. A warp calls it.
__device__ __forceinline__ float2 sizes_of_values(const char* values, int lane) {
  const uint4 loaded[2] = {__ldg(reinterpret_cast<const uint4*>(values + 16 * lane)),
                           __ldg(reinterpret_cast<const uint4*>(values + 16 * lane + 512))};
  std::uint32_t tops = 0;
#pragma unroll
  for (const uint4& v : loaded) {
    for (const std::uint32_t w : {v.x, v.y, v.z, v.w}) tops = __vmaxu2(tops, w & 0x7fff7fffu);
  }
  const float largest =
      __uint_as_float(__reduce_max_sync(kFullWarp, max(tops & 0xffffu, tops >> 16)) << 16);
  // The values are scaled below 1, so that no square overflows and the largest does not vanish.
  int exponent;
  frexpf(largest, &exponent);
  const float unit = ldexpf(1.0f, min(-exponent, 126));
  float sum = 0;
#pragma unroll
  for (const uint4& v : loaded) {
    for (const std::uint32_t w : {v.x, v.y, v.z, v.w}) {
      const float low = __uint_as_float(w << 16) * unit;
      const float high = __uint_as_float(w & 0xffff0000u) * unit;
      sum = fmaf(low, low, fmaf(high, high, sum));
    }
  }
  return {largest, sqrtf(warp_sum(sum)) / unit};
}

// Writes lse2 of a query's heads, and delta if it is given. Otherwise the scores kernel computes
// delta or, with kForBounds (before the fused kernel), this function, which then also writes
// head_sizes. `any`: the query sees something.
template <bool kForBounds>
__device__ __forceinline__ void prepare_heads(const Params& p, int query, int warp, int lane,
                                              bool any) {
  const int heads = p.blocks * kBlockHeads;
  for (int head = warp; head < heads; head += kPrepareWarps) {
    float delta = 0, lse2 = infinity();
    float2 sizes{};
    if (head < p.h_q) {
      lse2 = __ldg(p.lse + query * p.lse_stride + head) * kLog2e;
      if (p.attn_sink != nullptr) {
        lse2 = log2_add(lse2, __ldg(p.attn_sink + head * p.attn_sink_stride) * kLog2e);
      }
      // Nothing seen, or all weight on the sink: no gradient. (NaN too: it has no meaning here.)
      if (!any || !(fabsf(lse2) < infinity())) lse2 = infinity();
      if (p.given_delta != nullptr) {
        delta = __ldg(p.given_delta + query * p.given_delta_stride + head);
      } else if constexpr (kForBounds) {
        const char* a = p.out + query * p.out_stride0 + head * p.out_stride1 + lane * 16;
        const char* b = p.d_out + query * p.d_out_stride0 + head * p.d_out_stride1 + lane * 16;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          delta += dot_bf16x8(__ldg(reinterpret_cast<const uint4*>(a + 512 * half)),
                              __ldg(reinterpret_cast<const uint4*>(b + 512 * half)));
        }
        delta = warp_sum(delta);
      }
      if constexpr (kForBounds) {
        if (lse2 < infinity()) {
          sizes = sizes_of_values(p.d_out + query * p.d_out_stride0 + head * p.d_out_stride1, lane);
        }
      }
    }
    if (lane == 0) {
      const std::int64_t at = static_cast<std::int64_t>(query) * heads + head;
      p.lse2[at] = lse2;
      p.delta[at] = delta;
      if constexpr (kForBounds) p.head_sizes[at] = sizes;
    }
  }
}

__device__ __forceinline__ bool any_listed(const Params& p, int query) {
  return p.offsets[query * (p.ranges + std::int64_t{1}) + p.ranges] > 0;
}

// One block a query.
template <bool kForBounds>
__global__ void __launch_bounds__(kPrepareThreads)
    prepare_kernel(const __grid_constant__ Params p) {
  const int query = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (!kForBounds && query == 0 && threadIdx.x == 0) *p.dkv_taken = 0;
  select_entries(p, query, OneList{p.chosen, query});
  __syncthreads();
  prepare_heads<kForBounds>(p, query, warp, lane, any_listed(p, query));
}

// The same for two sources, and for ranges.
template <bool kForBounds>
__global__ void __launch_bounds__(kPrepareThreads)
    prepare_sources_kernel(const __grid_constant__ Params p,
                           const __grid_constant__ SourcesParams sources) {
  const int query = blockIdx.x;
  if (!kForBounds && query == 0 && threadIdx.x == 0) *p.dkv_taken = 0;
  select_entries(p, query, ListedEntries{sources, query});
  __syncthreads();
  const QueryRanges ranges = ranges_of(sources, query);
  if (sources.ranges != nullptr && threadIdx.x == 0) {
    sources.ranges[query] = ranges;
    sources.lengths[query] =
        ranges.rows() + p.offsets[query * (p.ranges + std::int64_t{1}) + p.ranges];
  }
  prepare_heads<kForBounds>(p, query, threadIdx.x / 32, threadIdx.x % 32,
                            ranges.rows() > 0 || any_listed(p, query));
}

// ---- Scores ------------------------------------------------------------------------------------
//
// A persistent block takes items (query, block of 64 heads). Warpgroup 0 holds q in registers and
// computes P, warpgroup 1 holds d_out, forms delta with out, which comes through the ring before
// the rows, and computes dS; both multiply with the same rows. They multiply in a ping-pong, so
// that one's arithmetic hides behind the other's products.
//
//   gather ring (full, empty)   -> warpgroup 0: logits, P -> image -> memory
//                               |                         | (p_ready, p_free)
//                               -> warpgroup 1: dP -------+-> dS -> image -> memory
//
// Warp w of either handles heads 16 w to 16 w + 15: a slice of 2048 bytes of the image, which only
// the warp itself stores to memory.

inline constexpr int kScoresThreads = 384;
inline constexpr int kScoresRegisters = 216;  // 144 hold q, 32 the logits
inline constexpr int kScoresGatherRegisters = 72;
inline constexpr int kWarpImageBytes = kChunkBytes / 4;

template <int kColumns>
struct ScoresLayout {
  static constexpr int kChunks = kColumns / kChunkColumns;       // 9 or 8
  static constexpr int kStageChunks = kChunks % 3 == 0 ? 3 : 2;  // of 64 rows
  static constexpr int kStages = 24 / kStageChunks;              // 8 or 12: nearly 3 tiles

  Chunk stages[kStages][kStageChunks];
  Chunk p[2], ds[2];       // images
  Barrier full[kStages];   // gather threads
  Barrier empty[kStages];  // warps of both warpgroups
  Barrier p_ready[2];      // warps of warpgroup 0
  Barrier p_free[2];       // warps of warpgroup 1
  Barrier ping_pong[2];    // warps of the other warpgroup
};

template <int kColumns>
struct ScoresPlan : Shared<ScoresLayout<kColumns>> {
  using Memory = ScoresLayout<kColumns>;
  static constexpr int kChunks = Memory::kChunks;
  static constexpr int kSteps = kColumns / 16;  // 36 or 32
  static constexpr int kStageChunks = Memory::kStageChunks;
  static constexpr int kStageSteps = kStageChunks * 4;
  static constexpr int kTileStages = kChunks / kStageChunks;  // 3 or 4
  static constexpr int kStages = Memory::kStages;
  static_assert(sizeof(Memory) <= kSharedLimit);

  WINNOW_PLACE(stages)
  WINNOW_PLACE(p)
  WINNOW_PLACE(ds)
  WINNOW_PLACE(full)
  WINNOW_PLACE(empty)
  WINNOW_PLACE(p_ready)
  WINNOW_PLACE(p_free)
  WINNOW_PLACE(ping_pong)
};

struct ScoresItem {
  int query, block, entries;
  int first_tile, end_tile;
};

__device__ __forceinline__ bool scores_item(const Params& p, int number, ScoresItem& item) {
  Turn turn;
  if (!block_turn(p.queries * p.blocks, number, turn)) return false;
  item.query = turn.item / p.blocks;
  item.block = turn.item % p.blocks;
  item.entries = query_entries(p.rows, item.query);
  const int tiles = tile_count(item.entries);
  item.first_tile = turn.begin_of(tiles);
  item.end_tile = turn.end_of(tiles);
  return true;
}

// Whether the scores kernel computes delta.
__device__ __forceinline__ bool forms_delta(const Params& p) { return p.given_delta == nullptr; }

// lse2 of a block's 64 heads.
__device__ __forceinline__ const float* block_lse2(const Params& p, int query, int block) {
  return p.lse2 + (static_cast<std::int64_t>(query) * p.blocks + block) * kBlockHeads;
}

// The heads of a block, in the shape of a tile. Those without gradient, and those past the last,
// become zeros whatever their values: 0 times NaN would spoil the sums of the others.
__device__ __forceinline__ GatherRows block_rows(const char* heads, std::int64_t stride,
                                                 int first_head, const float* lse2, int thread) {
  return head_rows(heads, stride, first_head, thread, [&](int pass, int) {
    return __ldg(lse2 + 16 * pass + thread / 8) < infinity();
  });
}

// Copies the first `kCopied` chunks of 64 rows through the stages of one tile.
template <int kCopied, class Plan>
__device__ __forceinline__ void scores_copy(Plan shared, PipelineState<Plan::kStages>& ring,
                                            const GatherRows& rows, int thread,
                                            std::uint64_t policy) {
#pragma unroll
  for (int s = 0; s < Plan::kTileStages; ++s) {
    shared.empty()[ring.stage].wait(ring.parity ^ 1, "gather", ring.stage);
#pragma unroll
    for (int c = 0; c < Plan::kStageChunks; ++c) {
      const int chunk = s * Plan::kStageChunks + c;
      if (chunk < kCopied) {
        gather_chunk<kFetched>(shared.stages()[ring.stage][c].address, rows, chunk, thread, policy);
      }
    }
    shared.full()[ring.stage].arrive_cp_async();
    ring.advance();
  }
}

// The entries of a query, for load_tile() and row_now().
__device__ __forceinline__ const std::int32_t* entries_of(const Params& p, int query) {
  return p.rows.indices + query * p.rows.indices_stride;
}
__device__ __forceinline__ RangedEntries entries_of(const WithRanges<Params>& p, int query) {
  return {p.query_ranges + query, p.rows.indices + query * p.rows.indices_stride};
}

// Copies q, with kDOut also d_out and out, and the rows of each item. Kernel: Params, or WithRanges
// of them.
template <bool kDOut = true, class Plan, class Kernel>
__device__ __forceinline__ void scores_gather(const Kernel& p, Plan shared) {
  const int thread = threadIdx.x % 128, lane = threadIdx.x % 32;
  const std::uint64_t once = policy_evict_first(), keep = policy_evict_last();
  PipelineState<Plan::kStages> ring;
  ScoresItem item;
  for (int number = 0; scores_item(p, number, item); ++number) {
    if (item.first_tile == item.end_tile) continue;
    const auto list = entries_of(p, item.query);
    TileEntries next = load_tile(list, item.first_tile, item.entries, lane);
    const int first_head = item.block * kBlockHeads;
    const float* lse2 = block_lse2(p, item.query, item.block);
    scores_copy<Plan::kChunks>(
        shared, ring,
        block_rows(p.q + item.query * p.q_stride0, p.q_stride1, first_head, lse2, thread), thread,
        once);
    if constexpr (kDOut) {
      scores_copy<kValueChunks>(shared, ring,
                                block_rows(p.d_out + item.query * p.d_out_stride0, p.d_out_stride1,
                                           first_head, lse2, thread),
                                thread, once);
      if (forms_delta(p)) {
        scores_copy<kValueChunks>(
            shared, ring,
            block_rows(p.out + item.query * p.out_stride0, p.out_stride1, first_head, lse2, thread),
            thread, once);
      }
    }
    for (int tile = item.first_tile; tile < item.end_tile; ++tile) {
      const GatherRows rows =
          gather_rows(p.rows, next, tile_mask(next, std::uint32_t{1} << 31), thread);
      if (tile + 1 < item.end_tile) next = load_tile(list, tile + 1, item.entries, lane);
      scores_copy<Plan::kChunks>(shared, ring, rows, thread, keep);
    }
  }
}

// Releases a tile of the ring that only the other warpgroup reads.
template <class Plan>
__device__ __forceinline__ void scores_skip(Plan shared, PipelineState<Plan::kStages>& ring) {
#pragma unroll
  for (int s = 0; s < Plan::kTileStages; ++s) {
    shared.full()[ring.stage].wait(ring.parity, "skip", ring.stage);
    shared.empty()[ring.stage].arrive_warp();
    ring.advance();
  }
}

// Brings 64 heads from the ring into registers as A operands.
template <int kSteps, class Plan>
__device__ __forceinline__ void scores_load_heads(Plan shared, PipelineState<Plan::kStages>& ring,
                                                  std::uint32_t (&a)[kSteps][4]) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int s = 0; s < Plan::kTileStages; ++s) {
    shared.full()[ring.stage].wait(ring.parity, "heads", ring.stage);
#pragma unroll
    for (int i = 0; i < Plan::kStageSteps; ++i) {
      const int step = s * Plan::kStageSteps + i;
      if (step < kSteps) {
        const std::uint32_t chunk = shared.stages()[ring.stage][i / 4].address;
        ldmatrix_x4(fragment_address(chunk, warp, lane, i % 4), a[step][0], a[step][1], a[step][2],
                    a[step][3]);
      }
    }
    shared.empty()[ring.stage].arrive_warp();
    ring.advance();
  }
}

// delta of the heads lane / 4 and lane / 4 + 8 of the warp's 16: products of d_out, which is in
// registers, with out, which comes in the next stages.
template <class Plan>
__device__ __forceinline__ void scores_delta(Plan shared, PipelineState<Plan::kStages>& ring,
                                             const std::uint32_t (&d_out)[kValueColumns / 16][4],
                                             float (&delta)[2]) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  delta[0] = delta[1] = 0;
#pragma unroll
  for (int s = 0; s < Plan::kTileStages; ++s) {
    shared.full()[ring.stage].wait(ring.parity, "delta", ring.stage);
#pragma unroll
    for (int i = 0; i < Plan::kStageSteps; i += 2) {
      const int step = s * Plan::kStageSteps + i;
      if (step < kValueColumns / 16) {
        const std::uint32_t chunk = shared.stages()[ring.stage][i / 4].address;
        std::uint32_t a[4], b[4];
        ldmatrix_x4(fragment_address(chunk, warp, lane, i % 4), a[0], a[1], a[2], a[3]);
        ldmatrix_x4(fragment_address(chunk, warp, lane, i % 4 + 1), b[0], b[1], b[2], b[3]);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          delta[r] += dot_bf16x8(
              {a[r], a[2 + r], b[r], b[2 + r]},
              {d_out[step][r], d_out[step][2 + r], d_out[step + 1][r], d_out[step + 1][2 + r]});
        }
      }
    }
    shared.empty()[ring.stage].arrive_warp();
    ring.advance();
  }
  delta[0] = quad_sum(delta[0]);
  delta[1] = quad_sum(delta[1]);
}

// d[64 heads x 64 rows] = A B^T for the first 16 * kSteps columns of the tile in the next stages.
// Waits for its side of the ping-pong when the first stage is there, and lets the other warpgroup
// go as soon as the last product is issued: those of the other queue up behind it.
template <int kSteps, class Plan>
__device__ __forceinline__ void scores_multiply(Plan shared, PipelineState<Plan::kStages>& ring,
                                                int warpgroup, std::uint32_t ping_pong_parity,
                                                const std::uint32_t (&a)[kSteps][4],
                                                float (&d)[32]) {
  int previous = 0;
#pragma unroll
  for (int s = 0; s < Plan::kTileStages; ++s) {
    shared.full()[ring.stage].wait(ring.parity, "multiply", ring.stage);
    if (s == 0) shared.ping_pong()[warpgroup].wait(ping_pong_parity, "pingpong", warpgroup);
    const std::uint64_t rows = descriptor_k_major(shared.stages()[ring.stage].address);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Plan::kStageSteps; ++i) {
      const int step = s * Plan::kStageSteps + i;
      if (step < kSteps) {
        wgmma_m64n64k16<Major::K>(d, a[step][0], a[step][1], a[step][2], a[step][3],
                                  rows + i / 4 * (kChunkBytes / 16) + i % 4 * 2, step > 0);
      }
    }
    wgmma_commit();
    if (s == Plan::kTileStages - 1) {
      shared.ping_pong()[1 - warpgroup].arrive_warp();
    }
    if (s > 0) {
      wgmma_wait<1>();
      shared.empty()[previous].arrive_warp();
    }
    previous = ring.stage;
    ring.advance();
  }
  wgmma_wait<0>();
  wgmma_pin(d);
  shared.empty()[previous].arrive_warp();
}

// Writes the warp's part of an image: w[2 j + r] holds row lane / 4 + 8 r, columns 8 j + 2 (lane %
// 4) + {0, 1}.
__device__ __forceinline__ void write_image(std::uint32_t image, int warp, int lane,
                                            const std::uint32_t (&w)[16]) {
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    stmatrix_x4(fragment_address(image, warp, lane, k16), w[4 * k16], w[4 * k16 + 1],
                w[4 * k16 + 2], w[4 * k16 + 3]);
  }
  fence_proxy_async_shared();  // each writer, before the warp synchronises and one lane stores
}

// Not less than the sum of the magnitudes of any column of the warp's 16 x 64 bf16 values, which
// are held as write_image() takes them. NaN or infinity if a value is.
__device__ __forceinline__ float largest_column(const std::uint32_t (&w)[16]) {
  float sums[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const std::uint32_t a = w[i / 2 * 2], b = w[i / 2 * 2 + 1];  // the thread's two rows
    const float x = __uint_as_float(i % 2 == 0 ? a << 16 : a & 0xffff0000u);
    const float y = __uint_as_float(i % 2 == 0 ? b << 16 : b & 0xffff0000u);
    sums[i] = fabsf(x) + fabsf(y);
  }
  halve_columns<8, 16>(sums);
  halve_columns<4, 8>(sums);
  halve_columns<2, 4>(sums);
  return __uint_as_float(
      __reduce_max_sync(kFullWarp, max(__float_as_uint(sums[0]), __float_as_uint(sums[1]))));
}
// The same for 16 heads as scores_load_heads() leaves them.
template <int kSteps>
__device__ __forceinline__ float largest_column_of_heads(const std::uint32_t (&a)[kSteps][4]) {
  float largest = 0;
#pragma unroll
  for (int chunk = 0; chunk < kSteps / 4; ++chunk) {
    std::uint32_t w[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) w[i] = a[4 * chunk + i / 4][i % 4];
    const float other = largest_column(w);
    largest = largest < other || other != other ? other : largest;  // NaN stays
  }
  return largest;
}
// The largest magnitude of the warp's 16 x 64 values, as bf16 orders them: NaN is largest.
__device__ __forceinline__ float largest_value(const std::uint32_t (&w)[16]) {
  std::uint32_t tops = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) tops = __vmaxu2(tops, w[i] & 0x7fff7fffu);
  return __uint_as_float(__reduce_max_sync(kFullWarp, max(tops & 0xffffu, tops >> 16)) << 16);
}
__device__ __forceinline__ float* head_norm(const Params& p, const ScoresItem& item, int warp) {
  return p.head_norms +
         ((static_cast<std::int64_t>(item.query) * p.blocks + item.block) * 4 + warp) * 2;
}
__device__ __forceinline__ float* tile_norm(const Params& p, int query, int tile, int block,
                                            int warp) {
  return p.tile_norms +
         (((static_cast<std::int64_t>(query) * p.tiles + tile) * p.blocks + block) * 4 + warp) * 2;
}

template <bool kNorms, class Plan>
__device__ __forceinline__ void scores_p(const Params& p, Plan shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const std::uint64_t policy = policy_evict_first();
  std::uint32_t q[Plan::kSteps][4];
  PipelineState<Plan::kStages> ring;
  std::uint32_t count = 0;  // of tiles so far
  ScoresItem item;
  for (int number = 0; scores_item(p, number, item); ++number) {
    if (item.first_tile == item.end_tile) continue;
    const float* lse = block_lse2(p, item.query, item.block) + 16 * warp + lane / 4;
    const float lse2[2] = {__ldg(lse), __ldg(lse + 8)};
    scores_load_heads(shared, ring, q);
    if constexpr (kNorms) {
      const float norm = largest_column_of_heads(q);
      if (lane == 0) head_norm(p, item, warp)[0] = norm;
    }
    scores_skip(shared, ring);
    if (forms_delta(p)) scores_skip(shared, ring);
    const bool any_dead = __any_sync(kFullWarp, fmaxf(lse2[0], lse2[1]) == infinity());
    for (int tile = item.first_tile; tile < item.end_tile; ++tile, ++count) {
      float s[32];
      scores_multiply(shared, ring, 0, count % 2 ^ 1, q, s);
#pragma unroll
      for (int i = 0; i < 32; ++i) s[i] = ex2(fmaf(s[i], p.scale_log2, -lse2[i / 2 % 2]));
      const int valid = item.entries - tile * kTileRows;
      if (valid < kTileRows || any_dead) {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          const bool counts = i / 4 * 8 + 2 * (lane & 3) + i % 2 < valid;
          s[i] = counts && lse2[i / 2 % 2] < infinity() ? s[i] : 0.0f;
        }
      }
      std::uint32_t w[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) w[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
      if constexpr (kNorms) {
        const float norm = largest_value(w);
        if (lane == 0) tile_norm(p, item.query, tile, item.block, warp)[0] = norm;
      }

      const int buffer = count % 2;
      const std::uint32_t image = shared.p()[buffer].address;
      if (lane == 0) bulk_wait_read<1>();  // the store two tiles ago
      __syncwarp();
      shared.p_free()[buffer].wait(count / 2 % 2 ^ 1, "p free", buffer);
      write_image(image, warp, lane, w);
      shared.p_ready()[buffer].arrive_warp();
      if (lane == 0) {
        bulk_store(image_pair(p, item.query, tile, item.block) + warp * kWarpImageBytes,
                   image + warp * kWarpImageBytes, kWarpImageBytes, policy);
        bulk_commit();
      }
    }
  }
  if (lane == 0) bulk_wait<0>();
}

template <bool kNorms, class Plan>
__device__ __forceinline__ void scores_ds(const Params& p, Plan shared) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const std::uint64_t policy = policy_evict_first();
  std::uint32_t d_out[kValueColumns / 16][4];
  PipelineState<Plan::kStages> ring;
  std::uint32_t count = 0;
  ScoresItem item;
  for (int number = 0; scores_item(p, number, item); ++number) {
    if (item.first_tile == item.end_tile) continue;
    scores_skip(shared, ring);
    scores_load_heads(shared, ring, d_out);
    float* const delta =
        p.delta + (static_cast<std::int64_t>(item.query) * p.blocks + item.block) * kBlockHeads +
        16 * warp + lane / 4;
    float shift[2];
    if (forms_delta(p)) {
      scores_delta(shared, ring, d_out, shift);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if ((lane & 3) == 0) delta[8 * r] = shift[r];
        shift[r] *= -p.scale;
      }
    } else {
#pragma unroll
      for (int r = 0; r < 2; ++r) shift[r] = -__ldg(delta + 8 * r) * p.scale;
    }
    if constexpr (kNorms) {
      // So that values which delta has unpacked are not kept for the norms: registers are short.
#pragma unroll
      for (auto& step : d_out) wgmma_pin(step);
      const float norm = largest_column_of_heads(d_out);
      if (lane == 0) head_norm(p, item, warp)[1] = norm;
    }
    for (int tile = item.first_tile; tile < item.end_tile; ++tile, ++count) {
      float d[32];
      scores_multiply(shared, ring, 1, count % 2, d_out, d);
      const int buffer = count % 2;
      const std::uint32_t p_image = shared.p()[buffer].address;
      std::uint32_t w[16];
      shared.p_ready()[buffer].wait(count / 2 % 2, "p", buffer);
#pragma unroll
      for (int k16 = 0; k16 < 4; ++k16) {
        ldmatrix_x4(fragment_address(p_image, warp, lane, k16), w[4 * k16], w[4 * k16 + 1],
                    w[4 * k16 + 2], w[4 * k16 + 3]);
      }
      shared.p_free()[buffer].arrive_warp();
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        // 0 where P is 0, so that nothing of a hidden entry or a head without gradient remains.
        const float low = __uint_as_float(w[i] << 16);
        const float high = __uint_as_float(w[i] & 0xffff0000u);
        const float a = low * fmaf(d[2 * i], p.scale, shift[i % 2]);
        const float b = high * fmaf(d[2 * i + 1], p.scale, shift[i % 2]);
        w[i] = pack_bf16(low == 0.0f ? 0.0f : a, high == 0.0f ? 0.0f : b);
      }
      if constexpr (kNorms) {
        const float norm = largest_value(w);
        if (lane == 0) tile_norm(p, item.query, tile, item.block, warp)[1] = norm;
      }
      const std::uint32_t image = shared.ds()[buffer].address;
      if (lane == 0) bulk_wait_read<1>();
      __syncwarp();
      write_image(image, warp, lane, w);
      __syncwarp();
      if (lane == 0) {
        bulk_store(
            image_pair(p, item.query, tile, item.block) + kChunkBytes + warp * kWarpImageBytes,
            image + warp * kWarpImageBytes, kWarpImageBytes, policy);
        bulk_commit();
      }
    }
  }
  if (lane == 0) bulk_wait<0>();
}

// With kNorms also the norms that the deterministic mode needs.
template <int kColumns, bool kNorms>
__global__ void __launch_bounds__(kScoresThreads, 1)
    scores_kernel(const __grid_constant__ Params p) {
  using Plan = ScoresPlan<kColumns>;
  const Plan shared{shared_address(dynamic_shared<1024>())};
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < Plan::kStages; ++slot) {
      shared.full()[slot].init(kGatherThreads);
      shared.empty()[slot].init(8 * kWarpArrival);
    }
    for (int i = 0; i < 2; ++i) {
      shared.p_ready()[i].init(4 * kWarpArrival);
      shared.p_free()[i].init(4 * kWarpArrival);
      shared.ping_pong()[i].init(4 * kWarpArrival);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    setmaxnreg_inc<kScoresRegisters>();
    scores_p<kNorms>(p, shared);
  } else if (warpgroup == 1) {
    setmaxnreg_inc<kScoresRegisters>();
    scores_ds<kNorms>(p, shared);
  } else {
    setmaxnreg_dec<kScoresGatherRegisters>();
    scores_gather(p, shared);
  }
}

}  // namespace winnow::sparse_mla::backward_split_detail
