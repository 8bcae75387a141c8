// Backward of top-k sparse MLA attention, sm100: what its three kernels share, and the first of
// them, the scores. The design is that of backward_split_sm90.cuh, whose preparation, lists of
// entries and reductions it uses; a pair of blocks, a cluster, takes the place of a block.
//
//   scores  S^T = K Q^T, dP^T = V dO^T over 256 entries x the heads of a group     -> P, dS in
//   scratch dq      dq = dS K (backward_products_sm100.cuh) dkv     dkv += P^T dO + dS^T Q (the
//   same)
//
// A group is up to 128 heads. An image is P or dS of 64 entries (rows) x 64 heads, dense; tensor
// copies bring it into the 128-byte swizzle. A tile of a pair is 256 entries, 128 for each block.
//
// Every kernel has 384 threads: warp 0 loads what goes through the ring, a lane of warp 1 of the
// even block issues the products of the pair, warp 2 loads what stays (the heads), warp 3 owns the
// tensor memory, and warps 4 to 11, the workers, take the sums out of it. Barriers that products
// wait for are those of the even block, to which copies and threads of both report; those that
// products end are multicast to both.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda.h>

#include "winnow/device/sm100/operand.cuh"
#include "winnow/device/sm100/tcgen05.cuh"
#include "winnow/device/sm100/tensor_copy.cuh"
#include "winnow/device/sm90/cluster.cuh"
#include "winnow/sparse_mla/backward/backward_split_sm90.cuh"

namespace winnow::sparse_mla::backward_sm100_detail {

using namespace winnow::device;
using backward_split_detail::kBlockHeads;
using backward_split_detail::kSharedLimit;
using backward_split_detail::kValueChunks;

inline constexpr int kThreads = 384;
inline constexpr int kWorkerWarps = 8;
inline constexpr int kPairTile = 256;   // entries
inline constexpr int kBlockTile = 128;  // of each block
inline constexpr std::uint32_t kTensorColumns = 512;
inline constexpr int kBoxHeads = 32;  // of a copy of q or d_out

struct Params : backward_split_detail::Params {
  CUtensorMap q_map, d_out_map;  // [queries, heads, columns], boxes of 32 heads x 64 columns
  CUtensorMap q_half_map;        // of 32 columns, in the 64-byte swizzle
  CUtensorMap kv_map;            // [rows, columns], boxes of one row x 64 columns
  CUtensorMap kv_half_map;       // of 32 columns, in the 64-byte swizzle
  CUtensorMap image_map;         // [rows of images, 64 heads], boxes of an image
};

// A query and a group of its heads.
struct Item {
  int query, group, entries;
  int blocks;  // of 64 heads in the group: 1 or 2
};

__device__ __forceinline__ int pair_number() { return blockIdx.x / 2; }
__device__ __forceinline__ int pair_count() { return gridDim.x / 2; }

__device__ __forceinline__ bool next_item(const Params& p, int number, Item& item) {
  const int groups = ceil_div(p.blocks, 2), at = pair_number() + number * pair_count();
  item.query = at / groups;
  item.group = at % groups;
  if (item.query >= p.queries) return false;
  item.entries = query_entries(p.rows, item.query);
  item.blocks = min(2, p.blocks - 2 * item.group);
  return true;
}

// The first row of an image in image_map; kind 0 is P, 1 dS.
__device__ __forceinline__ int image_row(const Params& p, int query, int tile, int block,
                                         int kind) {
  return (((query * p.tiles + tile) * p.blocks + block) * 2 + kind) * kChunkRows;
}

// Four entries of a list from `first` on; -1, of which a gather makes zeros, from `entries` on.
__device__ __forceinline__ int4 four_entries(const Params& p, int query, int first, int entries) {
  const std::int32_t* list = p.rows.indices + query * p.rows.indices_stride + first;
  return {first < entries ? __ldg(list) : -1, first + 1 < entries ? __ldg(list + 1) : -1,
          first + 2 < entries ? __ldg(list + 2) : -1, first + 3 < entries ? __ldg(list + 3) : -1};
}

__device__ __forceinline__ const float* head_lse2(const Params& p, int query, int head) {
  return p.lse2 + static_cast<std::int64_t>(query) * p.blocks * kBlockHeads + head;
}

// Warp 3 allocates; all threads of the pair meet before and behind what they share.
__device__ __forceinline__ std::uint32_t open_tensor_memory(std::uint32_t slot, int warp) {
  if (warp == 3) {
    tcgen05_alloc<2>(slot, kTensorColumns);
    tcgen05_relinquish<2>();
    tcgen05_fence_before();
  }
  cluster_sync();
  tcgen05_fence_after();
  return ld_shared<std::uint32_t>(slot);
}
__device__ __forceinline__ void close_tensor_memory(std::uint32_t columns, int warp) {
  __syncwarp();
  cluster_sync();
  if (warp == 3) {
    tcgen05_fence_after();
    tcgen05_dealloc<2>(columns, kTensorColumns);
  }
}

// Until products have left the whole ring: a commit must not arrive in a block that has ended.
template <int kStages>
__device__ __forceinline__ void wait_for_ring(Place<Barrier[kStages]> empty,
                                              PipelineState<kStages> ring) {
  for (int i = 0; i < kStages; ++i) {
    empty[ring.stage].wait(ring.parity ^ 1, "ring end", ring.stage);
    ring.advance();
  }
}

// ---- Scores ------------------------------------------------------------------------------------
//
// Block r of the pair holds half of the group's heads, and of each tile the entries from 128 r on.
// A stage of the ring is 64 columns of those. All columns of a stage serve S, the values dP too:
//
//   ring (full, empty)  ->  S[256 x heads], dP[256 x heads] in tensor memory, twice
//                               | (sums_full, sums_free)
//                               v
//   workers: a thread has an entry, a warpgroup half of the heads  ->  P, dS  ->  images
//
// Before the first tile the workers form delta from d_out in shared memory, each block for its
// heads, and give it with lse to both (stats).

template <int kColumns>
struct ScoresLayout {
  static constexpr int kStages = 5;
  Chunk q[kColumns / kChunkColumns];
  Chunk d_out[kValueChunks];
  Chunk ring[kStages][2];
  float2 stats[2][128];  // [items]: lse2, -delta scale
  Barrier full[kStages], empty[kStages];
  Barrier heads_full;   // the block's own heads have landed
  Barrier heads_ready;  // both blocks' have
  Barrier heads_free;   // products, and workers that form delta
  Barrier stats_ready;  // workers of both blocks
  Barrier sums_full[2], sums_free[2];
  std::uint32_t tensor_memory;
};

template <int kColumns>
struct ScoresPlan : Shared<ScoresLayout<kColumns>> {
  using Memory = ScoresLayout<kColumns>;
  static constexpr int kChunks = kColumns / kChunkColumns;
  static constexpr int kStages = Memory::kStages;
  static constexpr int kStageBytes = sizeof(Memory::ring[0]);
  static_assert(sizeof(Memory) <= kSharedLimit);

  WINNOW_PLACE(q)
  WINNOW_PLACE(d_out)
  WINNOW_PLACE(ring)
  WINNOW_PLACE(stats)
  WINNOW_PLACE(full)
  WINNOW_PLACE(empty)
  WINNOW_PLACE(heads_full)
  WINNOW_PLACE(heads_ready)
  WINNOW_PLACE(heads_free)
  WINNOW_PLACE(stats_ready)
  WINNOW_PLACE(sums_full)
  WINNOW_PLACE(sums_free)
  WINNOW_PLACE(tensor_memory)
};
// Columns of tensor memory: S and dP of the tiles of even and odd number.
inline constexpr std::uint32_t kScoresBuffer = 256, kDpColumn = 128;

// Heads of the group that each block holds, and half of the columns of S and dP.
__device__ __forceinline__ int heads_of_block(const Item& item) { return 32 * item.blocks; }

// A warp: the entries, a stage after the other. Each lane gathers four of the block's 128.
template <int kColumns>
__device__ __forceinline__ void scores_load(const Params& p, ScoresPlan<kColumns> shared, int rank,
                                            int lane) {
  using Plan = ScoresPlan<kColumns>;
  const std::uint64_t keep = policy_evict_last();
  PipelineState<Plan::kStages> ring;
  Item item;
  for (int number = 0; next_item(p, number, item); ++number) {
    for (int first = 0; first < item.entries; first += kPairTile) {
      const int4 rows =
          four_entries(p, item.query, first + rank * kBlockTile + 4 * lane, item.entries);
      for (int c = 0; c < Plan::kChunks; ++c) {
        shared.empty()[ring.stage].wait(ring.parity ^ 1, "load", ring.stage);
        if (rank == 0 && lane == 0) {
          shared.full()[ring.stage].arrive_expect(2 * Plan::kStageBytes);
        }
        tensor_gather4_pair(shared.ring()[ring.stage].address + lane * 512, &p.kv_map,
                            map_shared(shared.full()[ring.stage].address, 0), c * kChunkColumns,
                            rows, keep);
        ring.advance();
      }
    }
  }
  wait_for_ring(shared.empty(), ring);
}

// A lane: the block's heads. Those that there are not become zeros.
template <int kColumns>
__device__ __forceinline__ void scores_load_heads(const Params& p, ScoresPlan<kColumns> shared,
                                                  int rank) {
  using Plan = ScoresPlan<kColumns>;
  const std::uint64_t once = policy_evict_first();
  const auto full = shared.heads_full();
  std::uint32_t count = 0;
  Item item;
  for (int number = 0; next_item(p, number, item); ++number) {
    if (item.entries == 0) continue;
    shared.heads_free().wait(count % 2 ^ 1, "heads", 0);
    const int heads = heads_of_block(item), first = item.group * 128 + rank * heads;
    full.arrive_expect((Plan::kChunks + kValueChunks) * heads * 128);
    for (int head = 0; head < heads; head += kBoxHeads) {
      for (int c = 0; c < Plan::kChunks; ++c) {
        tensor_load_pair(shared.q()[c].address + head * 128, &p.q_map, full.address,
                         c * kChunkColumns, first + head, item.query, once);
        if (c >= kValueChunks) continue;
        tensor_load_pair(shared.d_out()[c].address + head * 128, &p.d_out_map, full.address,
                         c * kChunkColumns, first + head, item.query, once);
      }
    }
    full.wait(count % 2, "heads", 1);
    shared.heads_ready().arrive_cluster(0);
    ++count;
  }
  shared.heads_free().wait(count % 2 ^ 1, "heads end", 0);
}

// A lane of the even block: the products of the pair.
template <int kColumns>
__device__ __forceinline__ void scores_multiply(const Params& p, ScoresPlan<kColumns> shared,
                                                std::uint32_t tensor_memory) {
  using Plan = ScoresPlan<kColumns>;
  PipelineState<Plan::kStages> ring;
  std::uint32_t items = 0, count = 0;  // of tiles
  Item item;
  for (int number = 0; next_item(p, number, item); ++number) {
    if (item.entries == 0) continue;
    const std::uint32_t shape =
        tcgen05_bf16(kPairTile, 2 * heads_of_block(item), Major::K, Major::K);
    shared.heads_ready().wait_cluster(items % 2, "multiply", 0);
    ++items;
    for (int first = 0; first < item.entries; first += kPairTile, ++count) {
      const std::uint32_t buffer = count % 2, s = tensor_memory + buffer * kScoresBuffer;
      shared.sums_free()[buffer].wait_cluster(count / 2 % 2 ^ 1, "sums", buffer);
      tcgen05_fence_after();
      for (int c = 0; c < Plan::kChunks; ++c) {
        shared.full()[ring.stage].wait(ring.parity, "multiply", ring.stage);
        tcgen05_fence_after();
        const std::uint64_t rows = tcgen05_k_major(shared.ring()[ring.stage].address);
        const std::uint64_t q = tcgen05_k_major(shared.q()[c].address);
        const std::uint64_t d_out = tcgen05_k_major(shared.d_out()[c].address);
#pragma unroll
        for (int k16 = 0; k16 < 4; ++k16) {
          tcgen05_mma<2>(s, rows + 2 * k16, q + 2 * k16, shape, c + k16 > 0);
        }
        if (c < kValueChunks) {
#pragma unroll
          for (int k16 = 0; k16 < 4; ++k16) {
            tcgen05_mma<2>(s + kDpColumn, rows + 2 * k16, d_out + 2 * k16, shape, c + k16 > 0);
          }
        }
        tcgen05_commit_multicast<2>(shared.empty()[ring.stage].address, 3);
        ring.advance();
      }
      tcgen05_commit_multicast<2>(shared.sums_full()[buffer].address, 3);
    }
    tcgen05_commit_multicast<2>(shared.heads_free().address, 3);
  }
}

// The workers: delta and lse of the block's heads, four threads to a head, for both blocks.
template <int kColumns>
__device__ __forceinline__ void scores_form_delta(const Params& p, ScoresPlan<kColumns> shared,
                                                  int rank, const Item& item, std::uint32_t items) {
  using Plan = ScoresPlan<kColumns>;
  const int worker = threadIdx.x - 128, lane = threadIdx.x % 32, row = worker / 4;
  const int heads = heads_of_block(item), head = item.group * 128 + rank * heads + row;
  shared.heads_full().wait(items % 2, "delta", 0);
  const bool held = row < heads;
  const float lse2 = held ? __ldg(head_lse2(p, item.query, head)) : infinity();
  float delta = 0;
  if (lse2 < infinity()) {  // the head is there
    if (p.given_delta != nullptr) {
      delta = __ldg(p.given_delta + item.query * p.given_delta_stride + head);
    } else {
      const char* out = p.out + item.query * p.out_stride0 + head * p.out_stride1;
      for (int i = lane % 4; i < 64; i += 4) {  // of 8 columns
        const int4 d = ld_shared_v4(shared.d_out()[i / 8].address + chunk_offset(row, i % 8));
        delta += dot_bf16x8(__ldg(reinterpret_cast<const uint4*>(out) + i),
                            {static_cast<unsigned>(d.x), static_cast<unsigned>(d.y),
                             static_cast<unsigned>(d.z), static_cast<unsigned>(d.w)});
      }
    }
  }
  if (p.given_delta == nullptr) delta = quad_sum(delta);
  if (held && lane % 4 == 0) {
    p.delta[static_cast<std::int64_t>(item.query) * p.blocks * kBlockHeads + head] = delta;
    const std::uint32_t at = shared.stats()[items % 2][rank * heads + row].address;
    for (std::uint32_t r = 0; r < 2; ++r) {
      st_shared_cluster(map_shared(at, r), {lse2, -delta * p.scale});
    }
  }
  shared.heads_free().arrive_warp();
  for (std::uint32_t r = 0; r < 2; ++r) {
    shared.stats_ready().arrive_warp_cluster(r);
  }
  shared.stats_ready().wait_cluster(items % 2, "stats", 0);
}

// Not less than the norm of 32 values, of their sum of squares and the largest of them, which
// serves where squares were lost to underflow or overflow. NaN or infinity if a value is.
__device__ __forceinline__ float norm_of(float squares, float largest) {
  return squares > 1e-30f && squares < 1e30f ? 1.001f * sqrtf(squares) : 6.0f * largest;
}

// The sum of squares of a thread's bf16 values, and the largest of them where it is of no use.
struct Norm {
  float squares = 0;
  std::uint32_t tops = 0;
  __device__ __forceinline__ void add(const std::uint32_t (&w)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float x = __uint_as_float(w[i] << 16), y = __uint_as_float(w[i] & 0xffff0000u);
      squares = fmaf(x, x, fmaf(y, y, squares));
      tops = __vmaxu2(tops, w[i] & 0x7fff7fffu);
    }
  }
  // Not less than the largest norm of 32 values of any lane. NaN or infinity if a value is.
  __device__ __forceinline__ float largest() const {
    const float most =
        __uint_as_float(__reduce_max_sync(kFullWarp, __float_as_uint(fabsf(squares))));
    const std::uint32_t top = __reduce_max_sync(kFullWarp, max(tops & 0xffffu, tops >> 16)) << 16;
    return norm_of(most, __uint_as_float(top));
  }
};

// P and dS of 16 heads of an entry: `s` and `d` are its sums, `stats` the heads' address.
__device__ __forceinline__ void weigh(const Params& p, std::uint32_t stats, bool counts,
                                      const std::uint32_t (&s)[16], const std::uint32_t (&d)[16],
                                      std::uint32_t (&weights)[8], std::uint32_t (&gradients)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int4 pair = ld_shared_v4(stats + 16 * i);  // lse2, shift of two heads
    const float lse[2] = {__int_as_float(pair.x), __int_as_float(pair.z)};
    const float shift[2] = {__int_as_float(pair.y), __int_as_float(pair.w)};
    float weight[2], gradient[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float x = ex2(fmaf(__uint_as_float(s[2 * i + e]), p.scale_log2, -lse[e]));
      weight[e] = counts && lse[e] < infinity() ? x : 0.0f;
    }
    weights[i] = pack_bf16(weight[0], weight[1]);
    // Selected where P is 0, so that nothing of a hidden entry or a dead head gets through.
    const float rounded[2] = {__uint_as_float(weights[i] << 16),
                              __uint_as_float(weights[i] & 0xffff0000u)};
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float x = rounded[e] * fmaf(__uint_as_float(d[2 * i + e]), p.scale, shift[e]);
      gradient[e] = rounded[e] == 0.0f ? 0.0f : x;
    }
    gradients[i] = pack_bf16(gradient[0], gradient[1]);
  }
}

template <int kColumns>
__device__ __forceinline__ void scores_work(const Params& p, ScoresPlan<kColumns> shared,
                                            std::uint32_t tensor_memory, int rank, int warp,
                                            int lane) {
  using Plan = ScoresPlan<kColumns>;
  const int half = warp / 4 - 1, quarter = warp % 4;  // of the heads, of the entries
  const std::uint32_t lanes = static_cast<std::uint32_t>(32 * quarter) << 16;
  std::uint32_t items = 0, count = 0;
  Item item;
  for (int number = 0; next_item(p, number, item); ++number) {
    if (item.entries == 0) continue;
    scores_form_delta<kColumns>(p, shared, rank, item, items);
    const auto stats = shared.stats()[items % 2];
    ++items;
    const int heads = heads_of_block(item), image_tiles = tile_count(item.entries);
    for (int first = 0; first < item.entries; first += kPairTile, ++count) {
      const std::uint32_t buffer = count % 2;
      shared.sums_full()[buffer].wait(count / 2 % 2, "weigh", buffer);
      tcgen05_fence_after();
      const int entry = first + rank * kBlockTile + 32 * quarter + lane;
      const int tile = entry / kTileRows;
      const bool counts = entry < item.entries, stored = tile < image_tiles;
      Norm norms[2];
      for (int head = half * heads; head < (half + 1) * heads; head += 16) {
        std::uint32_t s[16], d[16];
        const std::uint32_t at = tensor_memory + lanes + buffer * kScoresBuffer + head;
        tcgen05_ld_32x32b(at, s);
        tcgen05_ld_32x32b(at + kDpColumn, d);
        tcgen05_wait_ld();
        tcgen05_pin(s);
        tcgen05_pin(d);
        std::uint32_t weights[8], gradients[8];
        weigh(p, stats[head].address, counts, s, d, weights, gradients);
        const int block = 2 * item.group + head / kBlockHeads, in_block = head % kBlockHeads;
        if (stored) {
          char* const to = backward_split_detail::image_pair(p, item.query, tile, block) +
                           entry % kTileRows * 128 + in_block * 2;
          store_sector(to, weights);
          store_sector(to + kChunkBytes, gradients);
        }
        if (p.fixed == nullptr) continue;
        norms[0].add(weights);
        norms[1].add(gradients);
        if (in_block % 32 == 0) continue;
        // The two warps of an image have a part each for the same heads.
        const float most[2] = {norms[0].largest(), norms[1].largest()};
        if (stored && lane == 0) {
          float* const norm = backward_split_detail::tile_norm(p, item.query, tile, block,
                                                               in_block / 32 * 2 + quarter % 2);
          norm[0] = most[0];
          norm[1] = most[1];
        }
        norms[0] = norms[1] = {};
      }
      tcgen05_fence_before();
      shared.sums_free()[buffer].arrive_warp_cluster(0);
    }
  }
}

template <int kColumns>
__global__ void __launch_bounds__(kThreads, 1) scores_kernel(const __grid_constant__ Params p) {
  using Plan = ScoresPlan<kColumns>;
  const Plan shared{shared_address(dynamic_shared<1024>())};
  const int rank = static_cast<int>(cluster_rank()), lane = threadIdx.x % 32;
  const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Plan::kStages; ++stage) {
      shared.full()[stage].init(1);
      shared.empty()[stage].init(1);
    }
    shared.heads_full().init(1);
    shared.heads_ready().init(2);
    shared.heads_free().init(1 + kWorkerWarps * kWarpArrival);
    shared.stats_ready().init(2 * kWorkerWarps);
    for (int i = 0; i < 2; ++i) {
      shared.sums_full()[i].init(1);
      shared.sums_free()[i].init(2 * kWorkerWarps);
    }
    fence_mbarrier_init();
  }
  const std::uint32_t columns = open_tensor_memory(shared.tensor_memory().address, warp);
  if (warp == 0) {
    scores_load<kColumns>(p, shared, rank, lane);
  } else if (warp == 1) {
    if (rank == 0 && lane == 0) scores_multiply<kColumns>(p, shared, columns);
  } else if (warp == 2) {
    if (lane == 0) scores_load_heads<kColumns>(p, shared, rank);
  } else if (warp >= 4) {
    scores_work<kColumns>(p, shared, columns, rank, warp, lane);
  }
  close_tensor_memory(columns, warp);
}

}  // namespace winnow::sparse_mla::backward_sm100_detail
