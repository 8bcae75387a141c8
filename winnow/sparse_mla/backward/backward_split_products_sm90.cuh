// Backward of top-k sparse MLA attention, sm90, for many heads: the two kernels that multiply with
// P and dS (backward_split_sm90.cuh). Both work on a group of 128 heads and a slice of the columns:
// 0 to 255, or 256 to d_qk - 1. They read P and dS as images of 64 heads x 64 entries.
#pragma once

#include <cstddef>

#include "winnow/sparse_mla/backward/backward_split_drain_sm90.cuh"
#include "winnow/sparse_mla/backward/backward_split_sm90.cuh"

namespace winnow::sparse_mla::backward_split_detail {

inline constexpr int kProductThreads = 384;
inline constexpr int kProductRegisters = 216;  // 160 hold 64 x 320 sums
inline constexpr int kProductLoadRegisters = 72;
inline constexpr int kSliceChunks = 4;  // of the first slice; the second may have one more

template <int kColumns, int kSlice>
inline constexpr int kChunksOfSlice =
    kSlice == 0 ? kSliceChunks : kColumns / kChunkColumns - kSliceChunks;

// Sums of a warpgroup: 64 x 256, and 64 x 64 of the last columns where the slice has them.
struct Sums {
  float main[128];
  float last[32];
};

// ---- dq ----------------------------------------------------------------------------------------
//
// A persistent block takes items (query, group, slice). Each of two warpgroups adds dS K for a
// block of 64 heads over all tiles; both read the same rows, which are gathered once.

struct DqLayout {
  static constexpr int kStages = 4;
  struct Stage {
    Chunk rows[kSliceChunks + 1];
    Chunk ds[2];  // of two blocks
  };
  Stage stages[kStages];
  Barrier full[kStages];   // gather threads, and one for dS
  Barrier empty[kStages];  // warps of both warpgroups
};
struct DqStage : Shared<DqLayout::Stage> {
  WINNOW_PLACE(rows)
  WINNOW_PLACE(ds)
};
struct DqPlan : Shared<DqLayout> {
  static constexpr int kStages = DqLayout::kStages;
  static_assert(sizeof(DqLayout) <= kSharedLimit);

  WINNOW_PLACE(stages)
  WINNOW_PLACE(full)
  WINNOW_PLACE(empty)
  __device__ DqStage stage(int i) const { return {stages()[i].address}; }
};

struct ProductItem {
  int query, group, slice, entries;
  int blocks;  // of the group: 1 or 2
};

// The slices of a query come one after the other, alternating, so that every multiprocessor gets as
// many of the wide ones.
__device__ __forceinline__ bool dq_item(const Params& p, int number, ProductItem& item) {
  const int groups = ceil_div(p.blocks, 2);
  const int at = blockIdx.x + number * gridDim.x;
  const int pair = at / 2;
  item.query = pair / groups;
  item.group = pair % groups;
  item.slice = (at ^ (2 * pair / static_cast<int>(gridDim.x))) & 1;
  if (item.query >= p.queries) return false;
  item.entries = query_entries(p.rows, item.query);
  item.blocks = min(2, p.blocks - 2 * item.group);
  return true;
}

template <int kColumns>
__device__ __forceinline__ void dq_gather(const Params& p, DqPlan shared) {
  const int thread = threadIdx.x % 128, lane = threadIdx.x % 32;
  const std::uint64_t once = policy_evict_first(), keep = policy_evict_last();
  PipelineState<DqPlan::kStages> ring;
  ProductItem item;
  for (int number = 0; dq_item(p, number, item); ++number) {
    if (item.entries == 0) continue;
    const std::int32_t* list = p.rows.indices + item.query * p.rows.indices_stride;
    TileEntries next = load_tile(list, 0, item.entries, lane);
    const int tiles = tile_count(item.entries);
    for (int tile = 0; tile < tiles; ++tile) {
      const GatherRows rows =
          gather_rows(p.rows, next, tile_mask(next, std::uint32_t{1} << 31), thread);
      if (tile + 1 < tiles) next = load_tile(list, tile + 1, item.entries, lane);
      const DqStage stage = shared.stage(ring.stage);
      const auto full = shared.full()[ring.stage];
      shared.empty()[ring.stage].wait(ring.parity ^ 1, "gather", ring.stage);
      if (thread == 0) {
        full.arrive_expect(item.blocks * kChunkBytes);
        for (int b = 0; b < item.blocks; ++b) {
          bulk_load(stage.ds()[b].address,
                    image_pair(p, item.query, tile, 2 * item.group + b) + kChunkBytes, kChunkBytes,
                    full.address, once);
        }
      }
#pragma unroll
      for (int c = 0; c < kSliceChunks; ++c) {
        gather_chunk<kFetched>(stage.rows()[c].address, rows, item.slice * kSliceChunks + c, thread,
                               keep);
      }
      if (kChunksOfSlice<kColumns, 1> > kSliceChunks && item.slice == 1) {
        gather_chunk<kFetched>(stage.rows()[kSliceChunks].address, rows, 2 * kSliceChunks, thread,
                               keep);
      }
      full.arrive_cp_async();
      ring.advance();
    }
  }
}

// Stores 32 neighbouring columns of a head: v[k][e] are columns 8 k + 2 (lane % 4) + e. `at` is the
// element of the first of them.
__device__ __forceinline__ void store_dq(const Params& p, std::int64_t at, int lane, bool exists,
                                         const float (&v)[4][2]) {
  if (p.dq_f32) {
    float* const to = reinterpret_cast<float*>(p.dq) + at + 2 * (lane & 3);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (exists) *reinterpret_cast<float2*>(to + 8 * k) = {v[k][0], v[k][1]};
    }
  } else {
    std::uint32_t w[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) w[k] = pack_bf16(v[k][0], v[k][1]);
    quad_transpose(w, lane);
    if (exists) store_streaming(p.dq + 2 * (at + 8 * (lane & 3)), w[0], w[1], w[2], w[3]);
  }
}

template <int kChunks>
__device__ __forceinline__ void dq_multiply(const Params& p, DqPlan shared, const ProductItem& item,
                                            int warpgroup, PipelineState<DqPlan::kStages>& ring) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  Sums sums;
#pragma unroll
  for (int i = 0; i < 128; ++i) sums.main[i] = 0;
#pragma unroll
  for (int i = 0; i < 32; ++i) sums.last[i] = 0;
  const int tiles = tile_count(item.entries);
  int previous = 0;
  for (int tile = 0; tile < tiles; ++tile) {
    shared.full()[ring.stage].wait(ring.parity, "multiply", ring.stage);
    if (warpgroup < item.blocks) {
      const DqStage stage = shared.stage(ring.stage);
      const std::uint64_t ds = descriptor_k_major(stage.ds()[warpgroup].address);
      const std::uint64_t rows = descriptor_mn_major(stage.rows().address);
      wgmma_fence();
#pragma unroll
      for (int k16 = 0; k16 < 4; ++k16) {
        const std::uint64_t a = descriptor_offset(ds, 32 * k16);
        wgmma_m64n256k16<Major::K, Major::MN>(sums.main, a, descriptor_offset(rows, 2048 * k16),
                                              true);
        if constexpr (kChunks > kSliceChunks) {
          wgmma_m64n64k16<Major::K, Major::MN>(
              sums.last, a, descriptor_offset(rows, kSliceChunks * kChunkBytes + 2048 * k16), true);
        }
      }
      wgmma_commit();
      wgmma_wait<1>();
    }
    if (tile > 0) shared.empty()[previous].arrive_warp();
    previous = ring.stage;
    ring.advance();
  }
  wgmma_wait<0>();
  wgmma_pin(sums.main);
  wgmma_pin(sums.last);
  if (tiles > 0) shared.empty()[previous].arrive_warp();

  if (warpgroup >= item.blocks) return;
  const int block = 2 * item.group + warpgroup;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = 16 * warp + lane / 4 + 8 * r;
    const int head = block * kBlockHeads + row;
    const bool dead = !(__ldg(block_lse2(p, item.query, block) + row) < infinity());
    const std::int64_t at =
        item.query * p.dq_stride0 + head * p.dq_stride1 + item.slice * kSliceChunks * kChunkColumns;
#pragma unroll
    for (int part = 0; part < 2 * kChunks; ++part) {
      float v[4][2];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int i = 4 * (4 * part + k) + 2 * r + e;
          const float sum = i < 128 ? sums.main[i < 128 ? i : 0] : sums.last[i < 128 ? 0 : i - 128];
          v[k][e] = dead ? 0.0f : sum;  // also where a row holds NaN
        }
      }
      store_dq(p, at + 32 * part, lane, head < p.h_q, v);
    }
  }
}

template <int kColumns>
__global__ void __launch_bounds__(kProductThreads, 1) dq_kernel(const __grid_constant__ Params p) {
  const DqPlan shared{shared_address(dynamic_shared<1024>())};
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < DqPlan::kStages; ++slot) {
      shared.full()[slot].init(kGatherThreads + 1);
      shared.empty()[slot].init(8 * kWarpArrival);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
  if (warpgroup < 2) {
    setmaxnreg_inc<kProductRegisters>();
    PipelineState<DqPlan::kStages> ring;
    ProductItem item;
    for (int number = 0; dq_item(p, number, item); ++number) {
      if (kChunksOfSlice<kColumns, 1> == kSliceChunks || item.slice == 0) {
        dq_multiply<kSliceChunks>(p, shared, item, warpgroup, ring);
      } else {
        dq_multiply<kSliceChunks + 1>(p, shared, item, warpgroup, ring);
      }
    }
  } else {
    setmaxnreg_dec<kProductLoadRegisters>();
    dq_gather<kColumns>(p, shared);
  }
}

// ---- dkv ---------------------------------------------------------------------------------------
//
// A persistent block takes items: a query, a group and a slice, and of the tiles those in a range
// of keys. Where the f32 sums of all rows fit in L2 there is one range, and the slices of a query
// come together, because they read the same images. Otherwise the order is slice, range, query: all
// blocks add to the same slice of the same range at a time, which fits in L2.
//
// Some multiprocessors are slower than others by a fifth, since they are further from the memory
// that they add to. So that blocks stay in the same range and end together, each takes the next
// item when it is ready for one: the lane that loads the images of warpgroup 0 does, and tells the
// others. In one range most items go round the blocks all the same, so that the slices of a query
// stay together.
//
// An item's q and d_out stay in shared memory; its tiles alternate between two warpgroups, of which
// one multiplies while the other drains its sums into dkv. Each has its own ring of images. q and
// d_out of each block of heads are replaced one by one, as the last tiles are done with them: the
// last products and sums of an item run while the heads of the next one come.
//
//   sums[64 entries x slice] = sum over blocks of P^T d_out + dS^T q

struct DkvLayout {
  static constexpr int kSlots = 5;  // of a warpgroup's ring; P and dS of a block take one each
  static constexpr int kItems = 4;  // that are told at a time
  Chunk q[2][kSliceChunks + 1];     // [blocks]: the chunks of the slice
  Chunk d_out[2][kSliceChunks];     // [blocks]
  Chunk ring[2][kSlots];            // [warpgroups]
  Barrier full[2][kSlots];          // [warpgroups]: the loading lane
  Barrier empty[2][kSlots];         // [warpgroups]: warps of its reader
  Barrier heads_full[2][2];         // [blocks][d_out, q]: kHeadThreads
  Barrier heads_free[2][2];         // [blocks][d_out, q]: warps of both warpgroups
  Barrier item_full[kItems];        // the lane that takes the items
  Barrier item_empty[kItems];       // who else works on them: kItemReaders
  alignas(16) std::int32_t items[kItems][8];  // the words of a DkvItem
};

struct DkvPlan : Shared<DkvLayout> {
  static constexpr int kSlots = DkvLayout::kSlots;
  static_assert(sizeof(DkvLayout) <= kSharedLimit);

  WINNOW_PLACE(q)
  WINNOW_PLACE(d_out)
  WINNOW_PLACE(ring)
  WINNOW_PLACE(full)
  WINNOW_PLACE(empty)
  WINNOW_PLACE(heads_full)
  WINNOW_PLACE(heads_free)
  WINNOW_PLACE(item_full)
  WINNOW_PLACE(item_empty)
  WINNOW_PLACE(items)
};
inline constexpr int kHeadThreads = 64;
inline constexpr int kDOutOfHeads = 0, kQOfHeads = 1;

struct DkvItem : ProductItem {
  int first_tile, end_tile;
};
// Of an item that was told: eight warps that multiply, two that load heads, a lane that loads
// images.
inline constexpr int kItemReaders = 10 * kWarpArrival + 1;

// Of a warpgroup: the parity of the barriers of each block's heads, and whether they are used for
// the first time in an item, and the last.
struct HeadsUse {
  std::uint32_t parities;  // bit `block`
  bool first, last;

  template <int kWhich>
  __device__ __forceinline__ void begin(DkvPlan shared, int block, int warpgroup) const {
    if (!first) return;
    shared.heads_full()[block][kWhich].wait(parities >> block & 1, "heads", warpgroup);
  }
  template <int kWhich>
  __device__ __forceinline__ void end(DkvPlan shared, int block) const {
    if (last) shared.heads_free()[block][kWhich].arrive_warp();
  }
};

// False after the last item. An item may have no tiles.
__device__ __forceinline__ bool dkv_item(const Params& p, int number, DkvItem& item) {
  const int groups = ceil_div(p.blocks, 2);
  const int round = p.queries * groups;  // the items of a slice and a range
  const int late = max(number - p.dkv_cut.whole, 0);
  const int at = min(number, p.dkv_cut.whole) + late / p.dkv_cut.shares;
  if (at >= 2 * round * p.ranges) return false;
  const int range = p.ranges == 1 ? 0 : at / round % p.ranges;
  const int pair = p.ranges == 1 ? at / 2 : at % round;
  // With one range the slices alternate, so that every multiprocessor gets as many wide ones.
  item.slice =
      p.ranges == 1 ? (at ^ (2 * pair / static_cast<int>(gridDim.x))) & 1 : at / (round * p.ranges);
  item.query = pair / groups;
  item.group = pair % groups;
  item.blocks = min(2, p.blocks - 2 * item.group);
  const std::int32_t* offsets =
      p.offsets + static_cast<std::int64_t>(item.query) * (p.ranges + 1) + range;
  // A tile belongs to the range of its first entry.
  item.first_tile = tile_count(__ldg(offsets));
  item.end_tile = tile_count(__ldg(offsets + 1));
  if (number >= p.dkv_cut.whole) {
    const int share = late % p.dkv_cut.shares, tiles = item.end_tile - item.first_tile;
    item.end_tile = item.first_tile + tiles * (share + 1) / p.dkv_cut.shares;
    item.first_tile += tiles * share / p.dkv_cut.shares;
  }
  item.entries = query_entries(p.rows, item.query);
  return true;
}

// Of one lane: takes items, those that have tiles, and tells the others of them.
class DkvTaker {
 public:
  __device__ __forceinline__ DkvTaker(const Params& p, DkvPlan shared) : p_(p), shared_(shared) {}
  // False after the last one.
  __device__ __forceinline__ bool next(DkvItem& item) {
    do {
      const int round = round_ < p_.dkv_cut.fixed ? round_++ : p_.dkv_cut.fixed;
      const unsigned in_round =
          round < p_.dkv_cut.fixed ? unsigned{blockIdx.x} : atomicAdd(p_.dkv_taken, 1u);
      if (!dkv_item(p_, static_cast<int>(round * gridDim.x + in_round), item)) item.query = -1;
    } while (item.query >= 0 && item.first_tile == item.end_tile);
    shared_.item_empty()[ring_.stage].wait(ring_.parity ^ 1, "tell", ring_.stage);
    const auto to = shared_.items()[ring_.stage];
    const auto word = [](int value) { return static_cast<std::uint32_t>(value); };
    st_shared(to[0].address,
              uint4{word(item.query), word(item.group), word(item.slice), word(item.entries)});
    st_shared(to[4].address,
              uint4{word(item.blocks), word(item.first_tile), word(item.end_tile), 0});
    shared_.item_full()[ring_.stage].arrive();
    ring_.advance();
    return item.query >= 0;
  }

 private:
  const Params& p_;
  const DkvPlan shared_;
  int round_ = 0;  // of those that go round the blocks
  PipelineState<DkvLayout::kItems> ring_;
};

// The others, each warp or lane for itself.
template <bool kWarp>
class DkvReader {
 public:
  __device__ __forceinline__ explicit DkvReader(DkvPlan shared) : shared_(shared) {}
  // False after the last one.
  __device__ __forceinline__ bool next(DkvItem& item) {
    shared_.item_full()[ring_.stage].wait(ring_.parity, "item", ring_.stage);
    const auto from = shared_.items()[ring_.stage];
    const uint4 a = ld_shared_words(from[0].address), b = ld_shared_words(from[4].address);
    if constexpr (kWarp) {
      shared_.item_empty()[ring_.stage].arrive_warp();
    } else {
      shared_.item_empty()[ring_.stage].arrive();
    }
    ring_.advance();
    const auto number = [](std::uint32_t word) { return static_cast<int>(word); };
    item.query = number(a.x), item.group = number(a.y), item.slice = number(a.z);
    item.entries = number(a.w), item.blocks = number(b.x);
    item.first_tile = number(b.y), item.end_tile = number(b.z);
    return item.query >= 0;
  }

 private:
  const DkvPlan shared_;
  PipelineState<DkvLayout::kItems> ring_;
};

// One lane: the images of the tiles that warpgroup `reader` works on, of the items of a DkvTaker or
// a DkvReader.
template <class Items>
__device__ __forceinline__ void dkv_load_images(const Params& p, DkvPlan shared, int reader,
                                                Items items) {
  const std::uint64_t policy = p.keep_images ? policy_evict_last() : policy_evict_first();
  PipelineState<DkvPlan::kSlots> ring;
  DkvItem item;
  std::uint32_t count = 0;  // of tiles so far, of both warpgroups
  while (items.next(item)) {
    for (int tile = item.first_tile; tile < item.end_tile; ++tile, ++count) {
      if (static_cast<int>(count % 2) != reader) continue;
      const char* source = image_pair(p, item.query, tile, 2 * item.group);
      for (int i = 0; i < 2 * item.blocks; ++i) {
        const auto full = shared.full()[reader][ring.stage];
        shared.empty()[reader][ring.stage].wait(ring.parity ^ 1, "images",
                                                reader * DkvPlan::kSlots + ring.stage);
        full.arrive_expect(kChunkBytes);
        bulk_load(shared.ring()[reader][ring.stage].address, source + i * kChunkBytes, kChunkBytes,
                  full.address, policy);
        ring.advance();
      }
    }
  }
}

// kHeadThreads threads: kChunks chunks of the slice of 64 heads of q or of d_out, from `heads` on.
template <int kChunks>
__device__ __forceinline__ void dkv_copy_heads(std::uint32_t to, const char* heads,
                                               std::int64_t stride, int first_head,
                                               std::uint32_t valid, int thread,
                                               std::uint64_t policy) {
#pragma unroll
  for (int pass = 0; pass < 8; ++pass) {
    const bool counts = valid >> pass & 1;
    const char* from = heads + (counts ? first_head + 8 * pass + thread / 8 : 0) * stride;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      cp_async_zfill<kFetched>(to + c * kChunkBytes + pass * 1024, from + c * 128, counts, policy);
    }
  }
}

// kHeadThreads threads: the slice of the group's q and d_out.
template <int kColumns>
__device__ __forceinline__ void dkv_load_heads(const Params& p, DkvPlan shared, int thread) {
  const std::uint64_t policy = policy_evict_first();
  constexpr int kWide = kChunksOfSlice<kColumns, 1>;
  DkvReader<true> items(shared);
  DkvItem item;
  std::uint32_t uses = 0;  // bit `block`: the parity of its barriers
  while (items.next(item)) {
    // 8 lanes copy 128 bytes of a head; 8 heads a pass.
    const int column = item.slice * kSliceChunks * 128 + (thread & 7) * 16;
    const std::uint32_t in_chunk = chunk_offset(thread / 8, thread & 7);
    const char* const q = p.q + item.query * p.q_stride0 + column;
    const char* const d_out = p.d_out + item.query * p.d_out_stride0 + column;
    for (int b = 0; b < item.blocks; ++b) {
      const int block = 2 * item.group + b;
      const float* const lse2 = block_lse2(p, item.query, block) + thread / 8;
      std::uint32_t valid = 0;
#pragma unroll
      for (int pass = 0; pass < 8; ++pass) {
        valid |= static_cast<std::uint32_t>(__ldg(lse2 + 8 * pass) < infinity()) << pass;
      }
      const std::uint32_t parity = (uses >> b & 1) ^ 1;
      shared.heads_free()[b][kDOutOfHeads].wait(parity, "heads", b);
      dkv_copy_heads<kSliceChunks>(shared.d_out()[b].address + in_chunk, d_out, p.d_out_stride1,
                                   block * kBlockHeads, valid, thread, policy);
      shared.heads_full()[b][kDOutOfHeads].arrive_cp_async();
      shared.heads_free()[b][kQOfHeads].wait(parity, "heads", b);
      const std::uint32_t q_to = shared.q()[b].address + in_chunk;
      if (kWide == kSliceChunks || item.slice == 0) {
        dkv_copy_heads<kSliceChunks>(q_to, q, p.q_stride1, block * kBlockHeads, valid, thread,
                                     policy);
      } else {
        dkv_copy_heads<kWide>(q_to, q, p.q_stride1, block * kBlockHeads, valid, thread, policy);
      }
      shared.heads_full()[b][kQOfHeads].arrive_cp_async();
      uses ^= 1u << b;
    }
  }
}

// Adds one block's P^T d_out + dS^T q to the sums, or sets them with kFirst. P and dS come through
// the ring. On return the products with dS are still under way; `previous` is their slot.
template <int kChunks, bool kFirst>
__device__ __forceinline__ void dkv_block(DkvPlan shared, int warpgroup,
                                          PipelineState<DkvPlan::kSlots>& ring, int& previous,
                                          const HeadsUse& heads, Sums& sums) {
  constexpr int kBlock = kFirst ? 0 : 1;
  const auto full = shared.full()[warpgroup], empty = shared.empty()[warpgroup];
  const auto images = shared.ring()[warpgroup];
  const int number = warpgroup * DkvPlan::kSlots;
  full[ring.stage].wait(ring.parity, "multiply", number + ring.stage);
  heads.begin<kDOutOfHeads>(shared, kBlock, warpgroup);
  const std::uint64_t p = descriptor_mn_major(images[ring.stage].address);
  const std::uint64_t d_out = descriptor_mn_major(shared.d_out()[kBlock].address);
  wgmma_fence();
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    wgmma_m64n256k16<Major::MN, Major::MN>(sums.main, descriptor_offset(p, 2048 * k16),
                                           descriptor_offset(d_out, 2048 * k16),
                                           !kFirst || k16 > 0);
  }
  wgmma_commit();
  if constexpr (!kFirst) {
    wgmma_wait<1>();
    empty[previous].arrive_warp();
    heads.end<kQOfHeads>(shared, 0);
  }
  previous = ring.stage;
  ring.advance();

  full[ring.stage].wait(ring.parity, "multiply", number + ring.stage);
  heads.begin<kQOfHeads>(shared, kBlock, warpgroup);
  const std::uint64_t ds = descriptor_mn_major(images[ring.stage].address);
  const std::uint64_t q = descriptor_mn_major(shared.q()[kBlock].address);
  wgmma_fence();
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    wgmma_m64n256k16<Major::MN, Major::MN>(sums.main, descriptor_offset(ds, 2048 * k16),
                                           descriptor_offset(q, 2048 * k16), true);
    if constexpr (kChunks > kSliceChunks) {
      wgmma_m64n64k16<Major::MN, Major::MN>(
          sums.last, descriptor_offset(ds, 2048 * k16),
          descriptor_offset(q, kSliceChunks * kChunkBytes + 2048 * k16), !kFirst || k16 > 0);
    }
  }
  wgmma_commit();
  wgmma_wait<1>();
  empty[previous].arrive_warp();
  heads.end<kDOutOfHeads>(shared, kBlock);
  previous = ring.stage;
  ring.advance();
}

// The products of one tile, and its sums into dkv.
template <int kChunks, class Drain>
__device__ __forceinline__ void dkv_tile(const Params& p, DkvPlan shared, const DkvItem& item,
                                         int tile, int warpgroup, const HeadsUse& heads,
                                         PipelineState<DkvPlan::kSlots>& ring) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  Drain drain;
  drain.begin(p, item.query, tile, item.entries, warp, lane);

  Sums sums;
  int previous = 0;
  dkv_block<kChunks, true>(shared, warpgroup, ring, previous, heads, sums);
  if (item.blocks > 1) dkv_block<kChunks, false>(shared, warpgroup, ring, previous, heads, sums);
  wgmma_wait<0>();
  wgmma_pin(sums.main);
  if constexpr (kChunks > kSliceChunks) wgmma_pin(sums.last);
  shared.empty()[warpgroup][previous].arrive_warp();
  heads.end<kQOfHeads>(shared, item.blocks - 1);

  drain.locate(p, item.slice * kSliceChunks * kChunkColumns, lane);
#pragma unroll
  for (int g = 0; g < 8; ++g) drain.add(32 * g, lane, sums.main + 16 * g);
  if constexpr (kChunks > kSliceChunks) {
#pragma unroll
    for (int g = 0; g < 2; ++g) drain.add(256 + 32 * g, lane, sums.last + 16 * g);
  }
}

template <int kColumns, class Drain>
__device__ __forceinline__ void dkv_multiply(const Params& p, DkvPlan shared, int warpgroup) {
  PipelineState<DkvPlan::kSlots> ring;
  DkvReader<true> items(shared);
  DkvItem item;
  std::uint32_t count = 0;  // of tiles so far, of both warpgroups
  HeadsUse heads{0, true, true};
  while (items.next(item)) {
    const int own = item.first_tile + static_cast<int>((warpgroup + count) % 2);
    for (int tile = own; tile < item.end_tile; tile += 2) {
      heads.first = tile == own;
      heads.last = tile + 2 >= item.end_tile;
      if (kChunksOfSlice<kColumns, 1> == kSliceChunks || item.slice == 0) {
        dkv_tile<kSliceChunks, Drain>(p, shared, item, tile, warpgroup, heads, ring);
      } else {
        dkv_tile<kSliceChunks + 1, Drain>(p, shared, item, tile, warpgroup, heads, ring);
      }
    }
    if (own >= item.end_tile) {  // the only tile is the other warpgroup's
      // Waits all the same: its arrivals belong to this phase.
      heads.first = heads.last = true;
      for (int b = 0; b < item.blocks; ++b) {
        heads.begin<kDOutOfHeads>(shared, b, warpgroup);
        heads.end<kDOutOfHeads>(shared, b);
        heads.begin<kQOfHeads>(shared, b, warpgroup);
        heads.end<kQOfHeads>(shared, b);
      }
    }
    heads.parities ^= (1u << item.blocks) - 1;
    count += item.end_tile - item.first_tile;
  }
}

template <int kColumns, class Drain>
__global__ void __launch_bounds__(kProductThreads, 1) dkv_kernel(const __grid_constant__ Params p) {
  const DkvPlan shared{shared_address(dynamic_shared<1024>())};
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      for (int slot = 0; slot < DkvPlan::kSlots; ++slot) {
        shared.full()[i][slot].init(1);
        shared.empty()[i][slot].init(4 * kWarpArrival);
      }
      for (const int which : {kDOutOfHeads, kQOfHeads}) {
        shared.heads_full()[i][which].init(kHeadThreads);
        shared.heads_free()[i][which].init(8 * kWarpArrival);
      }
    }
    for (int i = 0; i < DkvLayout::kItems; ++i) {
      shared.item_full()[i].init(1);
      shared.item_empty()[i].init(kItemReaders);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
  if (warpgroup < 2) {
    setmaxnreg_inc<kProductRegisters>();
    dkv_multiply<kColumns, Drain>(p, shared, warpgroup);
  } else {
    setmaxnreg_dec<kProductLoadRegisters>();
    const int warp = threadIdx.x % 128 / 32;
    if (warp == 0) {
      if (threadIdx.x % 32 == 0) dkv_load_images(p, shared, 0, DkvTaker(p, shared));
    } else if (warp == 1) {
      if (threadIdx.x % 32 == 0) dkv_load_images(p, shared, 1, DkvReader<false>(shared));
    } else {
      dkv_load_heads<kColumns>(p, shared, threadIdx.x % 64);
    }
  }
}

// ---- Finish ------------------------------------------------------------------------------------

// d_sink[h] = -sum over queries of exp(sink - lse') delta. One block a block of 32 heads, warps in
// a fixed order over the queries.
inline constexpr int kSinkWarps = 32;
static __global__ void __launch_bounds__(32 * kSinkWarps)
    d_sink_kernel(const float* lse2, const float* delta, std::int64_t queries, int padded_heads,
                  int h_q, const float* attn_sink, std::int64_t attn_sink_stride, float* d_sink,
                  std::int64_t d_sink_stride) {
  WINNOW_BLOCK_SHARED(partial, float[kSinkWarps][32]);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.x * 32 + lane;
  const float sink2 = head < h_q ? __ldg(attn_sink + head * attn_sink_stride) * kLog2e : 0.0f;
  float sum = 0;
  for (std::int64_t query = warp; query < queries; query += kSinkWarps) {
    const float lse = lse2[query * padded_heads + head];
    if (lse < infinity()) sum -= ex2(sink2 - lse) * delta[query * padded_heads + head];
  }
  partial[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || head >= h_q) return;
  sum = 0;
  for (int w = 0; w < kSinkWarps; ++w) sum += partial[w][lane];
  d_sink[head * d_sink_stride] = sum;
}

// Rounds the sums to bf16; 8 columns a thread.
static __global__ void round_kernel(const float* sums, std::int64_t rows, int columns, char* dkv,
                                    std::int64_t dkv_stride) {
  const std::int64_t at = (blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x) * 8;
  if (at >= rows * columns) return;
  const float4 a = *reinterpret_cast<const float4*>(sums + at);
  const float4 b = *reinterpret_cast<const float4*>(sums + at + 4);
  const std::int64_t row = at / columns;
  store_streaming(dkv + 2 * (row * dkv_stride + at - row * columns), pack_bf16(a.x, a.y),
                  pack_bf16(a.z, a.w), pack_bf16(b.x, b.y), pack_bf16(b.z, b.w));
}

}  // namespace winnow::sparse_mla::backward_split_detail
