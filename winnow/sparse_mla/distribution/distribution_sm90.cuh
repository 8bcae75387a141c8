// The attention distribution of top-k sparse MLA attention, sm90: the kernel.
// attn_sum[i,j] = sum over heads of exp(scale q_h.k_j - lse_h).
//
// One persistent block per multiprocessor works through items: a query and a range of its tiles of
// 64 chosen cache rows. No output depends on more than one item, so a query can be cut anywhere.
//
//   gather    warpgroup 2      copies the heads of a query, then its chosen rows, into a ring
//   multiply  warpgroups 0, 1  hold 64 heads each in registers for a whole item, multiply them with
//                              one tile after the other and add the weights of their heads
//   reduce    one warp         adds the warps' partial sums, hides invalid entries, stores
//
//      rows --gather--> ring (full, empty) --multiply--> partial sums (ready, free) --reduce--> out
//
// Groups of 128 heads run one after the other; from the second on, `reduce` adds to what it stored
// itself. In a group of more than 64 heads both multiply warpgroups work on every tile. In a group
// of up to 64 both hold the same heads and take tiles in turn ("split"): nothing is multiplied
// twice. Every sum has a fixed order and a single writer: results are bitwise reproducible.
#pragma once

#include <cstddef>
#include <cstdint>

#include "winnow/device/common/math.cuh"
#include "winnow/device/common/shared.cuh"
#include "winnow/device/common/warp.cuh"
#include "winnow/device/sm90/barrier.cuh"
#include "winnow/device/sm90/copy.cuh"
#include "winnow/device/sm90/pipeline.cuh"
#include "winnow/device/sm90/places.cuh"
#include "winnow/device/sm90/wgmma.cuh"
#include "winnow/sparse_mla/gather_sm90.cuh"

namespace winnow::sparse_mla::distribution_sm90_detail {

// ---- Tiles -------------------------------------------------------------------------------------

// A tile is kTileRows = 64 chosen rows (gather_sm90.cuh): N of the matrix instruction.
inline constexpr int kBlockHeads = 64;   // heads in one warpgroup's registers: M
inline constexpr int kGroupHeads = 128;  // heads that are summed before anything is stored
inline constexpr int kWarpgroups = 4;    // multiply, multiply, gather, reduce
inline constexpr int kThreads = kWarpgroups * 128;

// Registers per thread; the four must fill the file of 512 x 128 and no more.
inline constexpr int kMultiplyRegisters = 216;  // 144 of them hold the heads, 32 the logits
inline constexpr int kGatherRegisters = 56;
inline constexpr int kReduceRegisters = 24;
static_assert(2 * kMultiplyRegisters + kGatherRegisters + kReduceRegisters == 512);

// ---- Shared memory -----------------------------------------------------------------------------

// A stage of the ring holds 2 or 3 neighbouring chunks (device/sm90/wgmma.cuh: 64 rows x 64
// columns, 8192 bytes) of the same 64 rows; a tile, or 64 heads of a query, is kTileStages stages.
using device::kChunkBytes;
using device::kChunkColumns;
inline constexpr int kPartialBuffers = 4;
inline constexpr int kPartialRows = 8;  // one per multiplying warp
inline constexpr int kSharedLimit = 232448;

// Whole queries go round the blocks. What remains of the last, incomplete round is cut into equal
// ranges of tiles, one for each block; a range touches two queries at most.
struct TailItem {
  int query, first_tile, end_tile, unused;
};

template <int kColumns>
struct Layout {
  static constexpr int kChunks = kColumns / kChunkColumns;       // 9 or 8
  static constexpr int kStageChunks = kChunks % 3 == 0 ? 3 : 2;  // 3 or 2
  static constexpr int kStages = kColumns == 576 ? 9 : 13;       // 3 tiles or more

  device::Chunk stages[kStages][kStageChunks];  // of 24576 or 16384 bytes each
  float partials[kPartialBuffers][kPartialRows][kTileRows];
  TailItem tail[2];
  device::Barrier full[kStages];
  device::Barrier empty[kStages];
  device::Barrier ready[kPartialBuffers];
  device::Barrier free[kPartialBuffers];
  device::Barrier ping_pong[2];  // [multiply warpgroups]
};

// kDense: the kernel is for dense problems, in which the entries of a query are the rows of kv.
template <int kColumns, bool kDenseProblem>
struct Shared : device::Shared<Layout<kColumns>> {
  static constexpr bool kDense = kDenseProblem;
  using Memory = Layout<kColumns>;
  static constexpr int kSteps = kColumns / 16;  // 36 or 32
  static constexpr int kStageChunks = Memory::kStageChunks;
  static constexpr int kStageSteps = kStageChunks * kChunkColumns / 16;  // 12 or 8
  static constexpr int kTileStages = Memory::kChunks / kStageChunks;     // 3 or 4
  static constexpr int kStages = Memory::kStages;
  static_assert(sizeof(Memory) <= kSharedLimit);
  static_assert(sizeof(Memory::stages[0]) % 1024 == 0);  // as the swizzle needs
  static_assert(kTileStages <= kStages);                 // PipelineState::advance wraps once

  WINNOW_PLACE(stages)
  WINNOW_PLACE(full)
  WINNOW_PLACE(empty)
  WINNOW_PLACE(ready)
  WINNOW_PLACE(free)
  WINNOW_PLACE(ping_pong)
  Memory* memory;  // what is read and written by pointer: partials and tail
};

// ---- Barriers ----------------------------------------------------------------------------------

// All in shared memory; one per stage, per buffer of partial sums, per multiply warpgroup:
//   full   the 128 gather threads, each when its copies have landed
//   empty  one lane of every multiplying warp, after its reads; a stage that only one of the two
//          warpgroups reads gets two arrivals from each of that one's warps
//   ready  one lane of every multiplying warp; two arrivals each where one warpgroup has the tile
//   free   one lane of the reducing warp
//   ping_pong  one lane of every warp of the other warpgroup: this one may multiply its next tile
// The ping-pong lets one warpgroup exponentiate while the other multiplies; left alone, both would
// come to wait for the same stage and idle the tensor cores together from then on. It also keeps
// the warpgroups within a tile of each other, without which the parity of `full` and `free`
// would mean nothing to the warpgroup that skips a phase.
inline constexpr int kFullArrivals = 128;
inline constexpr int kEmptyArrivals = 8;
inline constexpr int kReadyArrivals = 8;
inline constexpr int kFreeArrivals = 1;
inline constexpr int kPingPongArrivals = 4;

// ---- Work --------------------------------------------------------------------------------------

struct Params {
  GatherView rows;
  const char* q;     // [s_q, h_q, columns] bf16; strides count bytes
  const float* lse;  // [s_q, h_q]
  float* attn_sum;   // [s_q, topk]
  std::int64_t q_query_stride, q_head_stride, lse_stride, attn_sum_stride;
  int s_q, h_q;
  int tiles;         // of a query: ceil(topk / 64)
  float scale_log2;  // scale * log2(e)
  RangeView ranges;  // of a dense problem
};

// Tiles [first_tile, end_tile) of a query, of which the first `entries` entries count; tiles from
// active_end on hold none of them.
struct Item {
  int query, first_tile, end_tile, active_end, entries;
  // Of a dense problem: tiles from hidden_tile to first_tile lie below `begin`, the first row that
  // the query sees; `entries` are the rows below the last.
  int hidden_tile, begin;
};

__device__ inline void locate_tail(const Params& p, TailItem* tail) {
  const int first_query = p.s_q - p.s_q % static_cast<int>(gridDim.x);
  const std::int64_t all = static_cast<std::int64_t>(p.s_q - first_query) * p.tiles;
  const std::int64_t begin = all * blockIdx.x / gridDim.x;
  const std::int64_t end = all * (blockIdx.x + 1) / gridDim.x;
  const int query = static_cast<int>(begin / p.tiles);
  const std::int64_t border = static_cast<std::int64_t>(query + 1) * p.tiles;
  const std::int64_t offset = border - p.tiles;
  tail[0] = {first_query + query, static_cast<int>(begin - offset),
             static_cast<int>((end < border ? end : border) - offset), 0};
  tail[1] = {first_query + query + 1, 0, static_cast<int>(end > border ? end - border : 0), 0};
}

// The items of this block, the same sequence for every role. The length of the next query is on
// its way while the current one is worked on.
template <bool kDense>
class Schedule {
 public:
  __device__ Schedule(const Params& p, const TailItem* tail) : p_(p), tail_(tail) {
    rounds_ = p.s_q / static_cast<int>(gridDim.x);
    next_length_ = p.rows.topk;
    look_ahead();
  }

  __device__ bool next(Item& item) {
    // A block's first tail item is empty only if the second is.
    if (next_.first_tile >= next_.end_tile) return false;
    item.query = next_.query;
    item.first_tile = next_.first_tile;
    item.end_tile = next_.end_tile;
    if constexpr (kDense) {
      const QueryRange range = query_range(p_.rows, p_.ranges, item.query);
      item.entries = p_.h_q == 0 ? 0 : range.end;
      item.begin = range.begin;
      item.hidden_tile = item.first_tile;
      item.first_tile = min(max(item.first_tile, range.begin / kTileRows), item.end_tile);
    } else {
      item.entries = p_.h_q == 0 ? 0 : min(max(next_length_, 0), p_.rows.topk);
    }
    item.active_end = min(tile_count(item.entries), item.end_tile);
    ++number_;
    look_ahead();
    return true;
  }

 private:
  __device__ void look_ahead() {
    next_.first_tile = next_.end_tile = 0;
    if (number_ < rounds_) {
      next_.query = number_ * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
      next_.end_tile = p_.tiles;
    } else if (number_ < rounds_ + 2) {
      next_ = tail_[number_ - rounds_];
    }
    // Only loaded here: clamping would wait for it.
    if (p_.rows.topk_length != nullptr && next_.first_tile < next_.end_tile) {
      next_length_ = __ldg(p_.rows.topk_length + next_.query * p_.rows.topk_length_stride);
    }
  }

  const Params& p_;
  const TailItem* tail_;
  TailItem next_;
  int next_length_;
  int number_ = 0, rounds_;
};

// Where the entries of an item's query come from, and below which row they are visible.
template <bool kDense>
__device__ __forceinline__ auto entry_row(const Params& p, const Item& item) {
  if constexpr (kDense) {
    return RowEntries{0, item.begin};
  } else {
    return p.rows.indices + item.query * p.rows.indices_stride;
  }
}
template <bool kDense>
__device__ __forceinline__ std::uint32_t entry_limit(const Params& p, const Item& item) {
  if constexpr (kDense) {
    return item.entries;
  } else {
    return visible_rows(p.rows, item.query);
  }
}

// Whether a group's heads fit one warpgroup, so that the two take its tiles in turn.
__device__ inline bool is_split(const Params& p, int first_head) {
  return p.h_q - first_head <= kBlockHeads;
}

// ---- Gather ------------------------------------------------------------------------------------

// Copies 64 rows through the stages of one tile.
template <class Shared>
__device__ __forceinline__ void copy_rows(const Shared& shared,
                                          device::PipelineState<Shared::kStages>& ring,
                                          const GatherRows& rows, std::uint64_t policy) {
#pragma unroll
  for (int s = 0; s < Shared::kTileStages; ++s) {
    shared.empty()[ring.stage].wait(ring.parity ^ 1, "gather", ring.stage);
#pragma unroll
    for (int c = 0; c < Shared::kStageChunks; ++c) {
      gather_chunk(shared.stages()[ring.stage][c].address, rows, s * Shared::kStageChunks + c,
                   static_cast<int>(threadIdx.x % 128), policy);
    }
    shared.full()[ring.stage].arrive_cp_async();
    ring.advance(1);
  }
}

// Heads [first_head, first_head + 64) of a query, in the shape of a tile: those past the last are
// rows of zeros.
__device__ __forceinline__ GatherRows head_rows(const Params& p, int query, int first_head) {
  const int thread = threadIdx.x % 128;
  const char* heads = p.q + query * p.q_query_stride + thread % 8 * 16;
  GatherRows rows{};
#pragma unroll
  for (int pass = 0; pass < kGatherPasses; ++pass) {
    const int head = first_head + 16 * pass + thread / 8;
    const bool valid = head < p.h_q;
    rows.source[pass] = heads + (valid ? head : 0) * p.q_head_stride;
    rows.valid |= static_cast<std::uint32_t>(valid) << pass;
  }
  return rows;
}

template <class Shared>
__device__ __forceinline__ void gather(const Params& p, const Shared& shared) {
  const int thread = threadIdx.x % 128, lane = threadIdx.x % 32;
  const std::uint64_t q_policy = device::policy_evict_first();
  const std::uint64_t kv_policy = device::policy_evict_last();
  device::PipelineState<Shared::kStages> ring;
  Schedule<Shared::kDense> schedule(p, shared.memory->tail);
  Item item;
  while (schedule.next(item)) {
    if (item.first_tile >= item.active_end) continue;
    const auto indices = entry_row<Shared::kDense>(p, item);
    const std::uint32_t visible = entry_limit<Shared::kDense>(p, item);
    for (int first_head = 0; first_head < p.h_q; first_head += kGroupHeads) {
      // On their way while the heads are copied; later on, while the tile before is.
      TileEntries next = load_tile(indices, item.first_tile, item.entries, lane);
      copy_rows(shared, ring, head_rows(p, item.query, first_head), q_policy);
      if (!is_split(p, first_head)) {
        copy_rows(shared, ring, head_rows(p, item.query, first_head + kBlockHeads), q_policy);
      }
      for (int tile = item.first_tile; tile < item.active_end; ++tile) {
        const GatherRows rows = gather_rows(p.rows, next, tile_mask(next, visible), thread);
        if (tile + 1 < item.active_end) next = load_tile(indices, tile + 1, item.entries, lane);
        copy_rows(shared, ring, rows, kv_policy);
      }
    }
  }
}

// ---- Multiply ----------------------------------------------------------------------------------

// The ping-pong, as one warpgroup sees it.
template <class Shared>
struct PingPong {
  const Shared& shared;
  int warpgroup;
  std::uint32_t waits = 0;
  // Warpgroup 0 begins: its tile t follows tile t - 1 of the other, whose tile t follows its own.
  __device__ __forceinline__ void wait() {
    const std::uint32_t parity = (waits + (warpgroup == 0)) % 2;
    shared.ping_pong()[warpgroup].wait(parity, "pingpong", warpgroup);
    ++waits;
  }
  __device__ __forceinline__ void pass() { shared.ping_pong()[1 - warpgroup].arrive_warp(); }
};

// What a thread knows of the two heads whose logits it gets: rows lane / 4 and lane / 4 + 8 of its
// warp's 16.
struct Heads {
  float lse[2];
  bool padded[2];
  bool any_padded;  // in the warp
};

__device__ __forceinline__ Heads load_heads(const Params& p, int query, int first_head) {
  Heads heads;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int head = first_head + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r;
    heads.padded[r] = head >= p.h_q;
    heads.lse[r] = heads.padded[r] ? 0.0f : __ldg(p.lse + query * p.lse_stride + head);
  }
  heads.any_padded = __any_sync(device::kFullWarp, heads.padded[1]);
  return heads;
}

// Brings the 64 heads in the next stages into registers as A operands.
template <class Shared>
__device__ __forceinline__ void load_queries(const Shared& shared,
                                             device::PipelineState<Shared::kStages>& ring,
                                             int releases, std::uint32_t (&q)[Shared::kSteps][4]) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int s = 0; s < Shared::kTileStages; ++s) {
    shared.full()[ring.stage].wait(ring.parity, "heads", ring.stage);
    const auto stage = shared.stages()[ring.stage];
#pragma unroll
    for (int step = 0; step < Shared::kStageSteps; ++step) {
      std::uint32_t(&a)[4] = q[s * Shared::kStageSteps + step];
      device::ldmatrix_x4(device::fragment_address(stage[step / 4].address, warp, lane, step % 4),
                          a[0], a[1], a[2], a[3]);
    }
    shared.empty()[ring.stage].arrive_warp(releases);
    ring.advance(1);
  }
}

// logits[64 heads x 64 rows] of the tile in the next stages. Waits in the ping-pong when the first
// stage is there, and lets the other warpgroup go as soon as the last matrix instruction is issued:
// the other's queue up behind it.
template <class Shared>
__device__ __forceinline__ void multiply_tile(const Shared& shared,
                                              device::PipelineState<Shared::kStages>& ring,
                                              int releases, PingPong<Shared>& ping_pong,
                                              const std::uint32_t (&q)[Shared::kSteps][4],
                                              float (&logits)[32]) {
  int previous = 0;
#pragma unroll
  for (int s = 0; s < Shared::kTileStages; ++s) {
    shared.full()[ring.stage].wait(ring.parity, "multiply", ring.stage);
    device::fence_proxy_async_shared();  // before wgmma reads what cp.async wrote
    if (s == 0) ping_pong.wait();
    const std::uint64_t rows = device::descriptor_k_major(shared.stages()[ring.stage].address);
    device::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Shared::kStageSteps; ++step) {
      // Descriptors count 16 bytes: 16 columns further is + 2.
      const std::uint32_t(&a)[4] = q[s * Shared::kStageSteps + step];
      device::wgmma_m64n64k16<device::Major::K>(logits, a[0], a[1], a[2], a[3],
                                                rows + step / 4 * (kChunkBytes / 16) + step % 4 * 2,
                                                s + step > 0);
    }
    device::wgmma_commit();
    if (s == Shared::kTileStages - 1) ping_pong.pass();
    if (s > 0) {
      device::wgmma_wait<1>();
      shared.empty()[previous].arrive_warp(releases);
    }
    previous = ring.stage;
    ring.advance(1);
  }
  device::wgmma_wait<0>();
  device::wgmma_pin(logits);
  shared.empty()[previous].arrive_warp(releases);
}

// The weights of the warp's 16 heads, added: two columns per lane, 2 * lane and the next. A thread
// holds logits[4 g + 2 r + e] of row lane / 4 + 8 r, column 8 g + 2 (lane % 4) + e. The 8 lanes
// that share lane % 4 hold the same columns of different heads: they halve the columns among them
// three times, until lane has those of g = lane / 4.
__device__ __forceinline__ float2 add_weights(float (&logits)[32], const Heads& heads,
                                              float scale_log2) {
  // Here, not where the heads are loaded: nothing waits for lse before the first tile is done.
  const float lse_log2[2] = {heads.lse[0] * device::kLog2e, heads.lse[1] * device::kLog2e};
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    logits[i] = device::ex2(fmaf(logits[i], scale_log2, -lse_log2[i / 2 % 2]));
  }
  if (heads.any_padded) {
    // Not a multiplication: the logit of a padded head is 0 * inf where a row holds an infinity.
#pragma unroll
    for (int i = 0; i < 32; ++i) logits[i] = heads.padded[i / 2 % 2] ? 0.0f : logits[i];
  }
  float sums[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) sums[i] = logits[i / 2 * 4 + i % 2] + logits[i / 2 * 4 + 2 + i % 2];
  device::halve_columns<8, 16>(sums);
  device::halve_columns<4, 8>(sums);
  device::halve_columns<2, 4>(sums);
  return {sums[0], sums[1]};
}

template <class Shared>
__device__ __forceinline__ void multiply(const Params& p, const Shared& shared, int warpgroup) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  std::uint32_t q[Shared::kSteps][4];
  device::PipelineState<Shared::kStages> ring;
  std::uint32_t tiles_before = 0;  // of all items and groups so far: numbers the partial sums
  PingPong<Shared> ping_pong{shared, warpgroup};
  Schedule<Shared::kDense> schedule(p, shared.memory->tail);
  Item item;
  while (schedule.next(item)) {
    const int tiles = item.active_end - item.first_tile;
    if (tiles <= 0) continue;
    for (int first_head = 0; first_head < p.h_q; first_head += kGroupHeads) {
      const bool split = is_split(p, first_head);
      const Heads heads =
          load_heads(p, item.query, first_head + (split ? 0 : warpgroup * kBlockHeads));
      if (!split && warpgroup == 1) ring.advance(Shared::kTileStages);
      load_queries(shared, ring, split ? 1 : 2, q);
      if (!split && warpgroup == 0) ring.advance(Shared::kTileStages);

      // Of a split group's tiles, warpgroup 1 has the odd ones; with an odd number of tiles its
      // last round is empty.
      const int both = split ? 2 : 1;
      for (int round = 0; round < tiles; round += both) {
        const int tile = round + (split ? warpgroup : 0);
        if (split && warpgroup == 1) ring.advance(Shared::kTileStages);
        if (tile < tiles) {
          float logits[32];
          multiply_tile(shared, ring, both, ping_pong, q, logits);
          const std::uint32_t number = tiles_before + tile;
          const int buffer = number % kPartialBuffers;
          const float2 sums = add_weights(logits, heads, p.scale_log2);
          shared.free()[buffer].wait(number / kPartialBuffers % 2 ^ 1, "partial", buffer);
          const int row = (split ? 0 : warpgroup * 4) + warp;
          *reinterpret_cast<float2*>(&shared.memory->partials[buffer][row][2 * lane]) = sums;
          shared.ready()[buffer].arrive_warp(both);
        } else {
          ping_pong.wait();
          ping_pong.pass();
        }
        if (split && warpgroup == 0 && round + 1 < tiles) ring.advance(Shared::kTileStages);
      }
      tiles_before += tiles;
    }
  }
}

// ---- Reduce ------------------------------------------------------------------------------------

template <class Shared>
__device__ __forceinline__ void reduce(const Params& p, const Shared& shared) {
  const int lane = threadIdx.x % 32;
  std::uint32_t number = 0;
  Schedule<Shared::kDense> schedule(p, shared.memory->tail);
  Item item;
  while (schedule.next(item)) {
    const std::uint32_t visible = entry_limit<Shared::kDense>(p, item);
    const auto indices = entry_row<Shared::kDense>(p, item);
    float* attn_sum = p.attn_sum + item.query * p.attn_sum_stride;
    for (int first_head = 0; first_head < p.h_q; first_head += kGroupHeads) {
      const int rows = is_split(p, first_head) ? kPartialRows / 2 : kPartialRows;
      for (int tile = item.first_tile; tile < item.active_end; ++tile) {
        // A lane has entries `low` and `low + 32`, here and when it adds the next group's sums.
        const int low = tile * kTileRows + lane;
        const TileEntries entries = load_tile(indices, tile, item.entries, lane);
        float sum_low = 0.0f, sum_high = 0.0f;
        if (first_head > 0) {
          if (low < p.rows.topk) sum_low = attn_sum[low];
          if (low + 32 < p.rows.topk) sum_high = attn_sum[low + 32];
        }
        const int buffer = number % kPartialBuffers;
        shared.ready()[buffer].wait(number / kPartialBuffers % 2, "reduce", buffer);
        const auto& partials = shared.memory->partials[buffer];
        for (int r = 0; r < rows; ++r) {
          sum_low += partials[r][lane];
          sum_high += partials[r][lane + 32];
        }
        shared.free()[buffer].arrive_warp();
        ++number;
        // Selected, not multiplied: an entry that is not visible may have any sum.
        sum_low = static_cast<std::uint32_t>(entries.low) < visible ? sum_low : 0.0f;
        sum_high = static_cast<std::uint32_t>(entries.high) < visible ? sum_high : 0.0f;
        if (low < p.rows.topk) attn_sum[low] = sum_low;
        if (low + 32 < p.rows.topk) attn_sum[low + 32] = sum_high;
      }
    }
    const auto clear = [&](int begin, int end) {
      for (int tile = begin; tile < end; ++tile) {
        const int low = tile * kTileRows + lane;
        if (low < p.rows.topk) attn_sum[low] = 0.0f;
        if (low + 32 < p.rows.topk) attn_sum[low + 32] = 0.0f;
      }
    };
    if constexpr (Shared::kDense) clear(item.hidden_tile, item.first_tile);
    clear(max(item.first_tile, item.active_end), item.end_tile);
  }
}

// ---- Kernel ------------------------------------------------------------------------------------

template <int kColumns, bool kDense>
__global__ void __launch_bounds__(kThreads, 1)
    distribution_kernel(const __grid_constant__ Params p) {
  using Memory = Layout<kColumns>;
  std::byte* const bytes = device::dynamic_shared<1024>();
  const Shared<kColumns, kDense> shared{{device::shared_address(bytes)},
                                        reinterpret_cast<Memory*>(bytes)};
  constexpr int kStages = Memory::kStages;
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kStages; ++slot) {
      shared.full()[slot].init(kFullArrivals);
      shared.empty()[slot].init(kEmptyArrivals * device::kWarpArrival);
    }
    for (int buffer = 0; buffer < kPartialBuffers; ++buffer) {
      shared.ready()[buffer].init(kReadyArrivals * device::kWarpArrival);
      shared.free()[buffer].init(kFreeArrivals * device::kWarpArrival);
    }
    for (int warpgroup = 0; warpgroup < 2; ++warpgroup) {
      shared.ping_pong()[warpgroup].init(kPingPongArrivals * device::kWarpArrival);
    }
    device::fence_mbarrier_init();
    locate_tail(p, shared.memory->tail);
  }
  __syncthreads();

  const int warpgroup = __shfl_sync(device::kFullWarp, threadIdx.x / 128, 0);
  if (warpgroup < 2) {
    device::setmaxnreg_inc<kMultiplyRegisters>();
    multiply(p, shared, warpgroup);
  } else if (warpgroup == 2) {
    device::setmaxnreg_dec<kGatherRegisters>();
    gather(p, shared);
  } else {
    device::setmaxnreg_dec<kReduceRegisters>();
    if (threadIdx.x % 128 < 32) reduce(p, shared);
  }
}

}  // namespace winnow::sparse_mla::distribution_sm90_detail
