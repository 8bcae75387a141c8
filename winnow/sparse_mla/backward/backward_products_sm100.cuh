// Backward of top-k sparse MLA attention, sm100: the two kernels that multiply with P and dS
// (backward_sm100.cuh). Both blocks of a pair work on the same heads and split the columns of K, Q
// and dO between them, of each part of 256 columns the first half to the even block, and of the
// last 64 of d_qk 576 too (the narrow part).
#pragma once

#include <cstddef>

#include "winnow/sparse_mla/backward/backward_sm100.cuh"
#include "winnow/sparse_mla/backward/backward_split_products_sm90.cuh"

namespace winnow::sparse_mla::backward_sm100_detail {

inline constexpr int kPartColumns = 256, kParts = kValueChunks / 4;
inline constexpr int kPartChunks = 4;  // of both parts, in a block
template <int kColumns>
inline constexpr bool kNarrow = kColumns > kParts* kPartColumns;

// 64 rows of 32 columns, in the 64-byte swizzle.
inline constexpr int kNarrowBytes = kChunkBytes / 2;
struct NarrowRows {
  char bytes[kNarrowBytes];
};

// The first column of a block's chunk, of both parts.
__device__ __forceinline__ int part_column(int rank, int chunk) {
  return chunk / 2 * kPartColumns + rank * kPartColumns / 2 + chunk % 2 * kChunkColumns;
}
__device__ __forceinline__ int narrow_column(int rank) { return kParts * kPartColumns + 32 * rank; }

// ---- dq ----------------------------------------------------------------------------------------
//
// dq[128 heads x d_qk] = dS^T K over the entries, 64 of them a stage. Block r has the dS of 64
// heads and its columns of the rows. Sums of 64 heads stand in lanes 0 to 63, of the even block's
// columns, and 64 to 127, of the odd one's. In a group of 64 heads the odd block repeats the even
// one's, which are not stored.

template <int kColumns>
struct DqLayout {
  static constexpr int kStages = 5;
  struct Stage {
    Chunk rows[kPartChunks];
    Chunk ds;
    NarrowRows narrow;  // not used with d_qk 512
  };

  Stage stages[kStages];
  Barrier full[kStages], empty[kStages];
  Barrier sums_full, sums_free;
  std::uint32_t tensor_memory;
};
template <int kColumns>
struct DqStage : Shared<typename DqLayout<kColumns>::Stage> {
  using Memory = typename DqLayout<kColumns>::Stage;
  WINNOW_PLACE(rows)
  WINNOW_PLACE(ds)
  WINNOW_PLACE(narrow)
};
template <int kColumns>
struct DqPlan : Shared<DqLayout<kColumns>> {
  using Memory = DqLayout<kColumns>;
  using Stage = typename Memory::Stage;
  static constexpr int kStages = Memory::kStages;
  // That are copied.
  static constexpr int kStageBytes = sizeof(Stage) - (kNarrow<kColumns> ? 0 : sizeof(NarrowRows));
  static_assert(sizeof(Stage) % 1024 == 0 && sizeof(Memory) <= kSharedLimit);

  WINNOW_PLACE(stages)
  WINNOW_PLACE(full)
  WINNOW_PLACE(empty)
  WINNOW_PLACE(sums_full)
  WINNOW_PLACE(sums_free)
  WINNOW_PLACE(tensor_memory)
  __device__ DqStage<kColumns> stage(int i) const { return {stages()[i].address}; }
};
inline constexpr std::uint32_t kDqPart = 128, kDqNarrow = 256;  // columns of tensor memory

// A warp: lane l gathers the entries from 4 (l % 16) on, of every second chunk.
template <int kColumns>
__device__ __forceinline__ void dq_load(const Params& p, DqPlan<kColumns> shared, int rank,
                                        int lane) {
  using Plan = DqPlan<kColumns>;
  const std::uint64_t once = policy_evict_first(), keep = policy_evict_last();
  PipelineState<Plan::kStages> ring;
  Item item;
  for (int number = 0; next_item(p, number, item); ++number) {
    const int block = 2 * item.group + (item.blocks > 1 ? rank : 0);
    for (int tile = 0; tile < tile_count(item.entries); ++tile) {
      const int four = lane % 16 * 4;
      const int4 rows = four_entries(p, item.query, tile * kTileRows + four, item.entries);
      const auto stage = shared.stage(ring.stage);
      const auto full = shared.full()[ring.stage];
      const std::uint32_t told = map_shared(full.address, 0);
      shared.empty()[ring.stage].wait(ring.parity ^ 1, "load", ring.stage);
      if (rank == 0 && lane == 0) full.arrive_expect(2 * Plan::kStageBytes);
      for (int chunk = lane / 16; chunk < kPartChunks; chunk += 2) {
        tensor_gather4_pair(stage.rows()[chunk].address + four * 128, &p.kv_map, told,
                            part_column(rank, chunk), rows, keep);
      }
      if (kNarrow<kColumns> && lane < 16) {
        tensor_gather4_pair(stage.narrow().address + four * 64, &p.kv_half_map, told,
                            narrow_column(rank), rows, keep);
      }
      if (lane == 31) {
        tensor_load_pair(stage.ds().address, &p.image_map, told, 0,
                         image_row(p, item.query, tile, block, 1), once);
      }
      ring.advance();
    }
  }
  wait_for_ring(shared.empty(), ring);
}

// A lane of the even block.
template <int kColumns>
__device__ __forceinline__ void dq_multiply(const Params& p, DqPlan<kColumns> shared,
                                            std::uint32_t sums) {
  using Plan = DqPlan<kColumns>;
  constexpr std::uint32_t kWide = tcgen05_bf16(128, kPartColumns, Major::MN, Major::MN);
  constexpr std::uint32_t kSmall = tcgen05_bf16(128, 64, Major::MN, Major::MN);
  PipelineState<Plan::kStages> ring;
  std::uint32_t items = 0;
  Item item;
  for (int number = 0; next_item(p, number, item); ++number) {
    if (item.entries == 0) continue;
    shared.sums_free().wait_cluster(items % 2 ^ 1, "sums", 0);
    tcgen05_fence_after();
    ++items;
    for (int tile = 0; tile < tile_count(item.entries); ++tile) {
      shared.full()[ring.stage].wait(ring.parity, "multiply", ring.stage);
      tcgen05_fence_after();
      const auto stage = shared.stage(ring.stage);
      const std::uint64_t ds = tcgen05_mn_major(stage.ds().address, kChunkBytes);
      const std::uint64_t rows = tcgen05_mn_major(stage.rows().address, kChunkBytes);
      const std::uint64_t narrow = tcgen05_mn_major_64(stage.narrow().address, kNarrowBytes);
#pragma unroll
      for (int k16 = 0; k16 < 4; ++k16) {
        const std::uint64_t a = ds + 128 * k16;  // 2048 bytes, 16 entries
        const bool adds = tile + k16 > 0;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const std::uint64_t b = rows + 128 * k16 + part * (2 * kChunkBytes / 16);
          tcgen05_mma<2>(sums + part * kDqPart, a, b, kWide, adds);
        }
        if constexpr (kNarrow<kColumns>) {
          tcgen05_mma<2>(sums + kDqNarrow, a, narrow + 64 * k16, kSmall, adds);
        }
      }
      tcgen05_commit_multicast<2>(shared.empty()[ring.stage].address, 3);
      ring.advance();
    }
    tcgen05_commit_multicast<2>(shared.sums_full().address, 3);
  }
}

// Stores 16 columns of a head from element `at` of dq on.
__device__ __forceinline__ void store_dq_columns(const Params& p, std::int64_t at,
                                                 const std::uint32_t (&sums)[16]) {
  if (p.dq_f32) {
    auto* const to = reinterpret_cast<float4*>(p.dq + 4 * at);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to[i] = {__uint_as_float(sums[4 * i]), __uint_as_float(sums[4 * i + 1]),
               __uint_as_float(sums[4 * i + 2]), __uint_as_float(sums[4 * i + 3])};
    }
    return;
  }
  std::uint32_t w[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    w[i] = pack_bf16(__uint_as_float(sums[2 * i]), __uint_as_float(sums[2 * i + 1]));
  }
  store_streaming(p.dq + 2 * at, w[0], w[1], w[2], w[3]);
  store_streaming(p.dq + 2 * at + 16, w[4], w[5], w[6], w[7]);
}

// A thread has a head and half of a part; the narrow part is shared by the warpgroups.
template <int kColumns>
__device__ __forceinline__ void dq_work(const Params& p, DqPlan<kColumns> shared,
                                        std::uint32_t sums, int rank, int warp, int lane) {
  using Plan = DqPlan<kColumns>;
  const int part = warp / 4 - 1, row = warp % 4 * 32 + lane, side = row / 64;
  const std::uint32_t lanes = static_cast<std::uint32_t>(warp % 4 * 32) << 16;
  std::uint32_t items = 0;
  Item item;
  for (int number = 0; next_item(p, number, item); ++number) {
    const int head = (2 * item.group + rank) * kBlockHeads + row % 64;
    const bool exists = rank < item.blocks && head < p.h_q;
    // Also where a row holds NaN.
    const bool dead = !exists || !(__ldg(head_lse2(p, item.query, head)) < infinity());
    const std::int64_t at = item.query * p.dq_stride0 + head * p.dq_stride1;
    const bool any = item.entries > 0;
    if (any) {
      shared.sums_full().wait(items % 2, "drain", 0);
      tcgen05_fence_after();
      ++items;
    }
    const auto drain = [&](std::uint32_t from, int column) {
      std::uint32_t r[16];
      if (any) {
        tcgen05_ld_32x32b(sums + lanes + from, r);
        tcgen05_wait_ld();
        tcgen05_pin(r);
      }
#pragma unroll
      for (int i = 0; i < 16; ++i) r[i] = dead || !any ? 0 : r[i];
      if (exists) store_dq_columns(p, at + column, r);
    };
    for (int c = 0; c < kPartColumns / 2; c += 16) {
      drain(part * kDqPart + c, part * kPartColumns + side * kPartColumns / 2 + c);
    }
    if constexpr (kNarrow<kColumns>) drain(kDqNarrow + 16 * part, narrow_column(side) + 16 * part);
    if (!any) continue;
    tcgen05_fence_before();
    shared.sums_free().arrive_warp_cluster(0);
  }
}

template <int kColumns>
__global__ void __launch_bounds__(kThreads, 1) dq_kernel(const __grid_constant__ Params p) {
  using Plan = DqPlan<kColumns>;
  const Plan shared{shared_address(dynamic_shared<1024>())};
  const int rank = static_cast<int>(cluster_rank()), lane = threadIdx.x % 32;
  const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Plan::kStages; ++stage) {
      shared.full()[stage].init(1);
      shared.empty()[stage].init(1);
    }
    shared.sums_full().init(1);
    shared.sums_free().init(2 * kWorkerWarps);
    fence_mbarrier_init();
  }
  const std::uint32_t sums = open_tensor_memory(shared.tensor_memory().address, warp);
  if (warp == 0) {
    dq_load<kColumns>(p, shared, rank, lane);
  } else if (warp == 1) {
    if (rank == 0 && lane == 0) dq_multiply<kColumns>(p, shared, sums);
  } else if (warp >= 4) {
    dq_work<kColumns>(p, shared, sums, rank, warp, lane);
  }
  close_tensor_memory(sums, warp);
}

// ---- dkv ---------------------------------------------------------------------------------------
//
// dkv[256 entries x d_qk] = P^T dO + dS^T Q over the heads of the group, a part of the columns
// after the other: parts take turns in the two halves of tensor memory, each of which a warpgroup
// drains. The item's Q and dO stay in shared memory, the columns of the block; its tiles of P and
// dS come through the ring, 128 entries x 64 heads each, and stay for all parts. Items are those of
// next_item(), for a range of keys after the other (backward_split_products_sm90.cuh).

template <int kColumns>
struct DkvLayout {
  static constexpr int kSlots = 4;
  Chunk q[2][kPartChunks];      // [blocks of heads]
  Chunk d_out[2][kPartChunks];  // [blocks of heads]
  NarrowRows narrow_q[2];       // [blocks of heads]
  Chunk ring[kSlots][2];
  Barrier full[kSlots], empty[kSlots];
  Barrier heads_full;   // the block's own heads have landed
  Barrier heads_ready;  // both blocks' have, dead ones cleared
  Barrier heads_free;
  Barrier sums_full[2], sums_free[2];  // [halves]
  std::uint32_t tensor_memory;
};
template <int kColumns>
struct DkvPlan : Shared<DkvLayout<kColumns>> {
  using Memory = DkvLayout<kColumns>;
  static constexpr int kSlots = Memory::kSlots;
  // Parts of the columns, the narrow one last.
  static constexpr int kAllParts = kParts + (kNarrow<kColumns> ? 1 : 0);
  static_assert(offsetof(Memory, ring) % 1024 == 0 && sizeof(Memory) <= kSharedLimit);

  WINNOW_PLACE(q)
  WINNOW_PLACE(d_out)
  WINNOW_PLACE(narrow_q)
  WINNOW_PLACE(ring)
  WINNOW_PLACE(full)
  WINNOW_PLACE(empty)
  WINNOW_PLACE(heads_full)
  WINNOW_PLACE(heads_ready)
  WINNOW_PLACE(heads_free)
  WINNOW_PLACE(sums_full)
  WINNOW_PLACE(sums_free)
  WINNOW_PLACE(tensor_memory)
};

struct DkvItem : Item {
  int first_tile, end_tile;  // of 64 entries
};

__device__ __forceinline__ bool next_dkv_item(const Params& p, int number, DkvItem& item) {
  const int groups = ceil_div(p.blocks, 2), round = p.queries * groups;
  const int at = pair_number() + number * pair_count();
  if (at >= round * p.ranges) return false;
  item.query = at % round / groups;
  item.group = at % groups;
  item.blocks = min(2, p.blocks - 2 * item.group);
  item.entries = query_entries(p.rows, item.query);
  const std::int32_t* offsets =
      p.offsets + static_cast<std::int64_t>(item.query) * (p.ranges + 1) + at / round;
  // A tile belongs to the range of its first entry.
  item.first_tile = tile_count(__ldg(offsets));
  item.end_tile = tile_count(__ldg(offsets + 1));
  return true;
}

// Tiles of 64 entries that block `rank` has of the pair's tile from `tile` on.
__device__ __forceinline__ int tiles_of_block(const DkvItem& item, int tile, int rank) {
  return max(0, min(2, item.end_tile - tile - 2 * rank));
}

// A lane.
template <int kColumns>
__device__ __forceinline__ void dkv_load(const Params& p, DkvPlan<kColumns> shared, int rank) {
  using Plan = DkvPlan<kColumns>;
  const std::uint64_t policy = policy_evict_first();
  PipelineState<Plan::kSlots> ring;
  DkvItem item;
  for (int number = 0; next_dkv_item(p, number, item); ++number) {
    for (int tile = item.first_tile; tile < item.end_tile; tile += 4) {
      const int mine = tiles_of_block(item, tile, rank);
      for (int i = 0; i < 2 * item.blocks; ++i) {  // P and dS of each block of heads
        const auto full = shared.full()[ring.stage];
        const std::uint32_t told = map_shared(full.address, 0);
        shared.empty()[ring.stage].wait(ring.parity ^ 1, "images", ring.stage);
        // The odd block arrives too: where it has nothing to load, the pair would go on without it
        // and end two phases of its barrier before it looks.
        if (rank == 0) {
          full.arrive_expect((mine + tiles_of_block(item, tile, 1)) * kChunkBytes);
        } else {
          mbarrier_arrive_cluster(told);
        }
        for (int t = 0; t < mine; ++t) {
          tensor_load_pair(
              shared.ring()[ring.stage][t].address, &p.image_map, told, 0,
              image_row(p, item.query, tile + 2 * rank + t, 2 * item.group + i / 2, i % 2), policy);
        }
        ring.advance();
      }
    }
  }
  wait_for_ring(shared.empty(), ring);
}

// A warp: heads without gradient become zeros, whatever their values: 0 times NaN would spoil the
// sums of the others.
template <int kColumns>
__device__ __forceinline__ void dkv_clear_dead(const Params& p, DkvPlan<kColumns> shared,
                                               const DkvItem& item, int lane) {
  using Plan = DkvPlan<kColumns>;
  for (int first = 0; first < item.blocks * kBlockHeads; first += 32) {
    const int head = item.group * 128 + first + lane;
    const bool is_dead = !(__ldg(head_lse2(p, item.query, head)) < infinity());
    for (unsigned dead = __ballot_sync(kFullWarp, is_dead && head < p.h_q); dead != 0;
         dead &= dead - 1) {
      const int row = first + __ffs(dead) - 1, block = row / kBlockHeads, in_block = row % 64;
      const std::uint32_t in_chunk = in_block * 128 + lane % 8 * 16;
      st_shared(shared.q()[block][lane / 8].address + in_chunk, uint4{});
      st_shared(shared.d_out()[block][lane / 8].address + in_chunk, uint4{});
      if (kNarrow<kColumns> && lane < 4) {
        st_shared(shared.narrow_q()[block].address + in_block * 64 + lane * 16, uint4{});
      }
    }
  }
  fence_proxy_async_shared();
}

// A warp: Q and dO of the group, the block's columns.
template <int kColumns>
__device__ __forceinline__ void dkv_load_heads(const Params& p, DkvPlan<kColumns> shared, int rank,
                                               int lane) {
  using Plan = DkvPlan<kColumns>;
  const std::uint64_t once = policy_evict_first();
  const auto full = shared.heads_full();
  constexpr int kBlockBytes =
      2 * kPartChunks * kChunkBytes + (kNarrow<kColumns> ? kNarrowBytes : 0);
  std::uint32_t count = 0;
  DkvItem item;
  for (int number = 0; next_dkv_item(p, number, item); ++number) {
    if (item.first_tile == item.end_tile) continue;
    shared.heads_free().wait(count % 2 ^ 1, "heads", 0);
    if (lane == 0) {
      full.arrive_expect(item.blocks * kBlockBytes);
      for (int row = 0; row < item.blocks * kBlockHeads; row += kBoxHeads) {
        const int head = item.group * 128 + row, block = row / kBlockHeads, in_block = row % 64;
        for (int c = 0; c < kPartChunks; ++c) {
          tensor_load_pair(shared.q()[block][c].address + in_block * 128, &p.q_map, full.address,
                           part_column(rank, c), head, item.query, once);
          tensor_load_pair(shared.d_out()[block][c].address + in_block * 128, &p.d_out_map,
                           full.address, part_column(rank, c), head, item.query, once);
        }
        if constexpr (kNarrow<kColumns>) {
          tensor_load_pair(shared.narrow_q()[block].address + in_block * 64, &p.q_half_map,
                           full.address, narrow_column(rank), head, item.query, once);
        }
      }
    }
    full.wait(count % 2, "heads", 1);
    dkv_clear_dead<kColumns>(p, shared, item, lane);
    shared.heads_ready().arrive_warp_cluster(0);
    ++count;
  }
  shared.heads_free().wait(count % 2 ^ 1, "heads end", 0);
}

// Adds the product of a slot of the ring, 64 heads, with the rows described by `b`.
template <int kPart>
__device__ __forceinline__ void dkv_product(std::uint32_t sums, std::uint64_t images,
                                            std::uint64_t b, bool adds) {
  constexpr int kWidth = kPart < kParts ? kPartColumns : 64;
  constexpr std::uint32_t kShape = tcgen05_bf16(kPairTile, kWidth, Major::K, Major::MN);
  constexpr int kStep = kPart < kParts ? 128 : 64;  // of 16 bytes: 16 rows
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    tcgen05_mma<2>(sums, images + 2 * k16, b + kStep * k16, kShape, adds || k16 > 0);
  }
}

// Walks through the slots of a tile for one part of the columns.
template <int kColumns, int kPart>
__device__ __forceinline__ void dkv_part(DkvPlan<kColumns> shared, std::uint32_t tensor_memory,
                                         const DkvItem& item,
                                         PipelineState<DkvPlan<kColumns>::kSlots> ring,
                                         std::uint32_t& count) {
  using Plan = DkvPlan<kColumns>;
  const std::uint32_t half = count % 2, sums = tensor_memory + half * kPartColumns;
  shared.sums_free()[half].wait_cluster(count / 2 % 2 ^ 1, "sums", half);
  tcgen05_fence_after();
  for (int block = 0; block < item.blocks; ++block) {
#pragma unroll
    for (int kind = 0; kind < 2; ++kind) {  // P, dS
      const std::uint64_t images = tcgen05_k_major(shared.ring()[ring.stage].address);
      if constexpr (kPart == 0) {
        shared.full()[ring.stage].wait_cluster(ring.parity, "multiply", ring.stage);
        tcgen05_fence_after();
      }
      if constexpr (kPart < kParts) {
        const auto rows = (kind == 0 ? shared.d_out() : shared.q())[block][2 * kPart];
        dkv_product<kPart>(sums, images, tcgen05_mn_major(rows.address, kChunkBytes),
                           block + kind > 0);
      } else if (kind == 1) {
        const std::uint32_t rows = shared.narrow_q()[block].address;
        dkv_product<kPart>(sums, images, tcgen05_mn_major_64(rows, kNarrowBytes), block > 0);
      }
      // The narrow part has no use for P.
      constexpr int kLastOfP = kParts - 1, kLastOfDs = Plan::kAllParts - 1;
      if (kPart == (kind == 0 ? kLastOfP : kLastOfDs)) {
        tcgen05_commit_multicast<2>(shared.empty()[ring.stage].address, 3);
      }
      ring.advance();
    }
  }
  tcgen05_commit_multicast<2>(shared.sums_full()[half].address, 3);
  ++count;
}

// A lane of the even block.
template <int kColumns>
__device__ __forceinline__ void dkv_multiply(const Params& p, DkvPlan<kColumns> shared,
                                             std::uint32_t tensor_memory) {
  using Plan = DkvPlan<kColumns>;
  PipelineState<Plan::kSlots> ring;
  std::uint32_t items = 0, count = 0;  // of parts
  DkvItem item;
  for (int number = 0; next_dkv_item(p, number, item); ++number) {
    if (item.first_tile == item.end_tile) continue;
    shared.heads_ready().wait_cluster(items % 2, "multiply", 0);
    ++items;
    for (int tile = item.first_tile; tile < item.end_tile; tile += 4) {
      dkv_part<kColumns, 0>(shared, tensor_memory, item, ring, count);
      dkv_part<kColumns, 1>(shared, tensor_memory, item, ring, count);
      if constexpr (kNarrow<kColumns>) {
        dkv_part<kColumns, 2>(shared, tensor_memory, item, ring, count);
      }
      ring.advance(2 * item.blocks);
    }
    tcgen05_commit_multicast<2>(shared.heads_free().address, 3);
  }
}

// A warpgroup drains its half of tensor memory, a warp 16 entries at a time.
template <int kColumns, class Drain>
__device__ __forceinline__ void dkv_work(const Params& p, DkvPlan<kColumns> shared,
                                         std::uint32_t tensor_memory, int rank, int warp,
                                         int lane) {
  using Plan = DkvPlan<kColumns>;
  const int half = warp / 4 - 1, quarter = warp % 4;
  std::uint32_t count = 0;
  DkvItem item;
  for (int number = 0; next_dkv_item(p, number, item); ++number) {
    const int end = min(item.entries, item.end_tile * kTileRows);
    for (int tile = item.first_tile; tile < item.end_tile; tile += 4) {
      for (int part = 0; part < Plan::kAllParts; ++part, ++count) {
        if (static_cast<int>(count % 2) != half) continue;
        shared.sums_full()[half].wait(count / 2 % 2, "drain", half);
        tcgen05_fence_after();
        for (int row = 32 * quarter; row < 32 * quarter + 32; row += 16) {
          const int its_tile = tile + 2 * rank + row / kTileRows;
          if (its_tile * kTileRows + row % kTileRows >= end) continue;
          Drain drain;
          drain.begin(p, item.query, its_tile, end, row % kTileRows / 16, lane);
          drain.locate(p, part * kPartColumns, lane);
          const int columns = part < kParts ? kPartColumns : 64;
          for (int column = 0; column < columns; column += 32) {
            std::uint32_t r[16];
            tcgen05_ld_16x256b(tensor_memory + (static_cast<std::uint32_t>(row) << 16) +
                                   half * kPartColumns + column,
                               r);
            tcgen05_wait_ld();
            tcgen05_pin(r);
            float v[16];
#pragma unroll
            for (int i = 0; i < 16; ++i) v[i] = __uint_as_float(r[i]);
            drain.add(column, lane, v);
          }
        }
        tcgen05_fence_before();
        shared.sums_free()[half].arrive_warp_cluster(0);
      }
    }
  }
}

template <int kColumns, class Drain>
__global__ void __launch_bounds__(kThreads, 1) dkv_kernel(const __grid_constant__ Params p) {
  using Plan = DkvPlan<kColumns>;
  const Plan shared{shared_address(dynamic_shared<1024>())};
  const int rank = static_cast<int>(cluster_rank()), lane = threadIdx.x % 32;
  const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < Plan::kSlots; ++slot) {
      shared.full()[slot].init(2);  // the loading lanes of both blocks
      shared.empty()[slot].init(1);
    }
    shared.heads_full().init(1);
    shared.heads_ready().init(2);
    shared.heads_free().init(1);
    for (int i = 0; i < 2; ++i) {
      shared.sums_full()[i].init(1);
      shared.sums_free()[i].init(kWorkerWarps);
    }
    fence_mbarrier_init();
  }
  const std::uint32_t columns = open_tensor_memory(shared.tensor_memory().address, warp);
  if (warp == 0) {
    if (lane == 0) dkv_load<kColumns>(p, shared, rank);
  } else if (warp == 1) {
    if (rank == 0 && lane == 0) dkv_multiply<kColumns>(p, shared, columns);
  } else if (warp == 2) {
    dkv_load_heads<kColumns>(p, shared, rank, lane);
  } else if (warp >= 4) {
    dkv_work<kColumns, Drain>(p, shared, columns, rank, warp, lane);
  }
  close_tensor_memory(columns, warp);
}

// ---- Norms -------------------------------------------------------------------------------------

// For the deterministic mode: the largest norms of columns of q and d_out over 32 heads, twice,
// because the scores leave those of P and dS for each half of an image's entries. One block a query
// and 64 heads, a warp for 32 heads of q or d_out.
inline constexpr int kNormWarps = 4;
static __global__ void __launch_bounds__(32 * kNormWarps, 4)
    head_norms_kernel(const __grid_constant__ Params p) {
  const int query = blockIdx.x / p.blocks, block = blockIdx.x % p.blocks;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, half = warp / 2, kind = warp % 2;
  const int first = block * kBlockHeads + 32 * half;
  const char* heads = kind == 0 ? p.q + query * p.q_stride0 : p.d_out + query * p.d_out_stride0;
  const std::int64_t stride = kind == 0 ? p.q_stride1 : p.d_out_stride1;
  const int units = (kind == 0 ? p.columns : kValueChunks * kChunkColumns) / 8;
  std::uint32_t most = 0, top = 0;  // bits of the largest sum of squares, and value: NaN is largest
  for (int unit = lane; unit < units; unit += 32) {
    float squares[8] = {};
    const int end = min(first + 32, p.h_q);
#pragma unroll 1
    for (int head = first; head < end; ++head) {
      if (!(__ldg(head_lse2(p, query, head)) < infinity())) continue;
      const uint4 word = __ldg(reinterpret_cast<const uint4*>(heads + head * stride) + unit);
      const std::uint32_t w[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float x = __uint_as_float(i % 2 == 0 ? w[i / 2] << 16 : w[i / 2] & 0xffff0000u);
        squares[i] = fmaf(x, x, squares[i]);
        top = max(top, __float_as_uint(x) & 0x7fffffffu);
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) most = max(most, __float_as_uint(squares[i]) & 0x7fffffffu);
  }
  const float squares = __uint_as_float(__reduce_max_sync(kFullWarp, most));
  const float value = __uint_as_float(__reduce_max_sync(kFullWarp, top));
  if (lane > 0) return;
  const float norm = norm_of(squares, value);
  for (int part = 2 * half; part < 2 * half + 2; ++part) {
    p.head_norms[((static_cast<std::int64_t>(query) * p.blocks + block) * 4 + part) * 2 + kind] =
        norm;
  }
}

}  // namespace winnow::sparse_mla::backward_sm100_detail
