// Backward of the indexer, sm90.
//
// Every entry adds a row of f32 numbers to dk in memory, and these reductions take three times as
// long as the products, so the kernel is built around them: warps of their own add finished sums to
// memory, and two blocks share a multiprocessor, so that one adds while the other waits.
//
// A persistent block takes items: a query and 64 of its heads. Q and the sums of dq stay with the
// block while tiles of 64 entries pass:
//
//   gather    2 warps  Q, and the rows and d_scores of the tiles, into a ring; f8_e4m3 becomes
//                      bf16 on the way, and d_scores are multiplied with k_scale
//   multiply  4 warps  S = Q K^T; d_dot = d_scores * weights where S > 0; dq += d_dot K;
//                      d_weights; sums = d_dot^T Q, which are handed over 64 columns at a time
//   drain     2 warps  sums into dk
//
//   rows --gather--> ring (full, empty)    --multiply--> sums (sums_full, sums_free) --drain--> dk
//   Q    --gather--> q (q_full, q_free)    --multiply--> dq, d_weights
//
// d_dot goes into dq from the registers in which it was formed, and into dk through shared memory,
// as an image of 64 heads x 64 entries.
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
#include "winnow/indexer/backward/backward_sums.cuh"
#include "winnow/indexer/gather_sm90.cuh"

namespace winnow::indexer::backward_sm90_detail {

using namespace winnow::device;
using namespace gpu;

inline constexpr int kThreads = 256;  // multiply; gather and drain
inline constexpr int kMultiplyWarps = 4, kGatherWarps = 2, kDrainWarps = 2;
inline constexpr int kMultiplyRegisters = 200;
inline constexpr int kOtherRegisters = 56;
static_assert(2 * (kMultiplyRegisters + kOtherRegisters) == 512);  // of two blocks
inline constexpr std::uint32_t kImageBarrier = 1;                  // of the multiplying warps

// ---- Shared memory -----------------------------------------------------------------------------

// Tiles whose rows of dk are remembered. The gather is at most kStages tiles ahead of the products,
// and those two ahead of what the drain has read.
inline constexpr int kTargetTiles = 8;
inline constexpr int kSumStride = 72;  // floats of a row: 8 lanes of 16 bytes meet no bank twice
using Sums = float[kTileEntries][kSumStride];

template <int kRowChunks>
struct Layout {
  static constexpr int kChunks = kRowChunks;
  static constexpr int kStages = kRowChunks == 2 ? 3 : 4;
  static_assert(kStages + 2 < kTargetTiles);

  Chunk rows[kStages][kChunks];
  Chunk q[kChunks];
  Chunk d_dot;                                       // [64 heads][64 entries]
  Sums sums[kChunks];                                // [64 columns each]
  float d_scores[kStages][kTileEntries];             // 0 where absent
  std::int32_t targets[kTargetTiles][kTileEntries];  // rows of dk; -1 where absent
  std::uint32_t mask[kStages][kGatherWarps];         // bit r: entry 32 w + r is there
  Barrier full[kStages];       // lanes of gather with their copies, and its warps
  Barrier empty[kStages];      // warps of multiply
  Barrier q_full, q_free;      // lanes of gather with their copies; warps of multiply
  Barrier sums_full[kChunks];  // warps of multiply
  Barrier sums_free[kChunks];  // warps of drain
};

template <int kRowChunks>
struct Plan : Shared<Layout<kRowChunks>> {
  using Memory = Layout<kRowChunks>;
  static constexpr int kStages = Memory::kStages;
  static constexpr int kBytes = sizeof(Memory);
  static_assert(offsetof(Memory, sums) % 1024 == 0 && offsetof(Memory, mask) % 8 == 0);
  static_assert(kBytes <= 115712, "two blocks share the 228 KB of a multiprocessor");

  WINNOW_PLACE(rows)
  WINNOW_PLACE(q)
  WINNOW_PLACE(d_dot)
  WINNOW_PLACE(sums)
  WINNOW_PLACE(d_scores)
  WINNOW_PLACE(targets)
  WINNOW_PLACE(mask)
  WINNOW_PLACE(full)
  WINNOW_PLACE(empty)
  WINNOW_PLACE(q_full)
  WINNOW_PLACE(q_free)
  WINNOW_PLACE(sums_full)
  WINNOW_PLACE(sums_free)
};

// ---- Work --------------------------------------------------------------------------------------

struct Item {
  Entries entries;
  int first_head;
};

// The item of this number; false past the last.
__device__ __forceinline__ bool locate(const Params& p, unsigned number, Item& item) {
  if (number >= p.items) return false;
  const unsigned query = number / p.head_blocks;
  item.entries = chosen_sm90::entries_of(p.view, static_cast<int>(query));
  if (item.entries.begin == item.entries.end) item.entries.entries = 0;
  item.first_head = static_cast<int>(number - query * p.head_blocks) * kBlockHeads;
  return true;
}

// ---- Gather ------------------------------------------------------------------------------------

// The next tile, of which a lane holds entry 32 * warp + lane, as it comes from memory.
struct Next {
  unsigned number;  // of its item
  Item item;
  int tile, tiles;
  bool exists;
  int index;      // which the entry names; -1: it has none
  float d_score;  // beside it; of an absent entry it may be anything

  // The first tile from item `number` on.
  __device__ __forceinline__ void find(const Params& p) {
    tile = 0;
    for (exists = false; !exists && locate(p, number, item);) {
      tiles = item.entries.tiles();
      exists = tiles > 0;
      if (!exists) number += gridDim.x;
    }
  }
  __device__ __forceinline__ void load(const Params& p, int warp, int lane) {
    if (!exists) return;
    const int entry = tile * kTileEntries + 32 * warp + lane;
    index = chosen_sm90::index_of_entry(p.view, item.entries, entry);
    d_score = 0.0f;
    if (entry < item.entries.entries) {
      d_score =
          __ldg(p.d_scores + item.entries.query * p.d_scores_stride + item.entries.first + entry);
    }
  }
  __device__ __forceinline__ void advance(const Params& p) {
    if (++tile < tiles) return;
    number += gridDim.x;
    find(p);
  }
};

// Brings this warp's half of 64 rows, as copy_rows() does, in bf16. With it each lane arrives at
// `barrier` once. One kernel for each dtype: with both in one, ptxas 13.0 gives the copies of bf16
// a shared address in two registers, one of them uniform (LDGSTS [R6+UR0], desc[UR1]), which is an
// illegal instruction.
template <int kChunks, bool kF8>
__device__ __forceinline__ void bring_rows(const chosen_sm90::View& view, std::uint32_t destination,
                                           const char* first, std::int64_t stride, int row,
                                           int warp, std::uint64_t policy, Place<Barrier> barrier) {
  if constexpr (kF8) {
    chosen_sm90::widen_rows<kGatherWarps, kChunks>(destination, kChunkBytes, first, stride, row,
                                                   warp);
    fence_proxy_async_shared();
    barrier.arrive();
  } else {
    chosen_sm90::copy_rows<kGatherWarps, kChunks>(destination, kChunkBytes, first, stride,
                                                  view.row_bytes, row, warp, policy);
    barrier.arrive_cp_async();
  }
}

template <int kChunks, bool kF8>
__device__ __forceinline__ void gather(const Params& p, Plan<kChunks> shared, int warp) {
  const int lane = threadIdx.x % 32;
  const chosen_sm90::View& view = p.view;
  const std::uint64_t once = policy_evict_first(), keep = policy_evict_normal();
  PipelineState<Plan<kChunks>::kStages> ring;
  std::uint32_t count = 0, q_parity = 0;
  Next next;
  next.number = blockIdx.x;
  next.find(p);
  next.load(p, warp, lane);
  while (next.exists) {
    const int row = next.item.entries.row(next.index), tile = next.tile, tiles = next.tiles;
    const float d_score =
        row < 0 ? 0.0f : next.d_score * (kF8 ? chosen_sm90::scale_of(view, row) : 1.0f);
    const int query = next.item.entries.query, first_head = next.item.first_head;
    next.advance(p);
    next.load(p, warp, lane);

    const unsigned mask = __ballot_sync(kFullWarp, row >= 0);
    const auto full = shared.full()[ring.stage];
    shared.empty()[ring.stage].wait(ring.parity ^ 1, "gather", ring.stage);
    const int local = 32 * warp + lane;
    shared.d_scores()[ring.stage][local].store(d_score);
    shared.targets()[count % kTargetTiles][local].store(row);
    if (lane == 0) shared.mask()[ring.stage][warp].store(mask);
    full.arrive_warp();
    bring_rows<kChunks, kF8>(view, shared.rows()[ring.stage].address, view.k, view.k_row_stride,
                             row, warp, keep, full);
    ring.advance();
    ++count;
    // Q behind as many tiles as the ring holds: that of the item before is in use until then.
    if (tile != min(Plan<kChunks>::kStages, tiles) - 1) continue;
    shared.q_free().wait(q_parity ^ 1, "q", 0);
    q_parity ^= 1;
    const int head = first_head + local;
    bring_rows<kChunks, kF8>(view, shared.q().address, view.q + query * view.q_stride0,
                             view.q_stride1, head < view.h ? head : -1, warp, once,
                             shared.q_full());
  }
}

// ---- Multiply ----------------------------------------------------------------------------------

// d_dot of a tile as A fragments, and what the tile adds to d_weights. `s` are the accumulators of
// Q K^T; a thread has two heads, 8 apart. Absent entries count nothing, whatever Q holds.
template <bool kWhole>
__device__ __forceinline__ void weigh(const float (&s)[32], Place<float[kTileEntries]> d_scores,
                                      std::uint64_t mask, int lane, const float (&weight)[2],
                                      float (&d_weight)[2], std::uint32_t (&d_dot)[16]) {
  const auto mine = d_scores[2 * (lane % 4)];
  mask >>= 2 * (lane % 4);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const auto pair = ld_shared<std::uint64_t>((mine + 8 * j).address);
    const float d_score[2] = {__uint_as_float(static_cast<std::uint32_t>(pair)),
                              __uint_as_float(static_cast<std::uint32_t>(pair >> 32))};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float value[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float dot = s[4 * j + 2 * r + e];
        const bool counts = kWhole || (mask >> (8 * j + e) & 1);
        const float sum = fmaf(d_score[e], relu(dot), d_weight[r]);
        if (counts) d_weight[r] = sum;
        value[e] = counts && dot > 0.0f ? d_score[e] * weight[r] : 0.0f;
      }
      d_dot[2 * j + r] = pack_bf16(value[0], value[1]);
    }
  }
}

// Hands 64 columns of a tile's sums to the drain. Thread (warp, lane) holds entries 16 warp +
// lane / 4 and 8 further.
__device__ __forceinline__ void store_sums(Place<Sums> sums, int warp, int lane,
                                           const float (&d)[32]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const auto to = sums[16 * warp + lane / 4 + 8 * r][2 * (lane % 4)];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const std::uint64_t pair = std::uint64_t{__float_as_uint(d[4 * j + 2 * r + 1])} << 32 |
                                 __float_as_uint(d[4 * j + 2 * r]);
      st_shared((to + 8 * j).address, pair);
    }
  }
}

// The products of one tile; all have ended on return.
template <int kChunks>
__device__ __forceinline__ void multiply_tile(Plan<kChunks> shared, int stage, std::uint32_t parity,
                                              const float (&weight)[2], float (&d_weight)[2],
                                              float (&dq)[32 * kChunks]) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const std::uint32_t rows = shared.rows()[stage].address;
  const auto mask = ld_shared<std::uint64_t>(shared.mask()[stage].address);
  if (mask == 0) {  // the drain finds it out for itself
    shared.empty()[stage].arrive_warp();
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      shared.sums_free()[chunk].wait(parity ^ 1, "multiply", 10 + chunk);
      shared.sums_full()[chunk].arrive_warp();
    }
    return;
  }
  std::uint32_t d_dot[16];
  {
    float s[32];
    const std::uint64_t a = descriptor_k_major(shared.q().address), b = descriptor_k_major(rows);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4 * kChunks; ++step) {
      const std::uint32_t offset = step / 4 * kChunkBytes + step % 4 * 32;
      wgmma_m64n64k16<Major::K, Major::K>(s, descriptor_offset(a, offset),
                                          descriptor_offset(b, offset), step > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(s);
    const auto d_scores = shared.d_scores()[stage];
    if (mask == ~std::uint64_t{0}) {
      weigh<true>(s, d_scores, mask, lane, weight, d_weight, d_dot);
    } else {
      weigh<false>(s, d_scores, mask, lane, weight, d_weight, d_dot);
    }
  }
  const std::uint64_t rows_mn = descriptor_mn_major(rows);
  wgmma_pin(d_dot);
  wgmma_fence();
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    const std::uint64_t b = descriptor_offset(rows_mn, 2048 * k16);
    if constexpr (kChunks == 2) {
      wgmma_m64n128k16<Major::MN>(dq, d_dot[4 * k16], d_dot[4 * k16 + 1], d_dot[4 * k16 + 2],
                                  d_dot[4 * k16 + 3], b, true);
    } else {
      wgmma_m64n64k16<Major::MN>(dq, d_dot[4 * k16], d_dot[4 * k16 + 1], d_dot[4 * k16 + 2],
                                 d_dot[4 * k16 + 3], b, true);
    }
  }
  wgmma_commit();

  bar_sync<128>(kImageBarrier);  // all warps are done with the image of the tile before
  // Step k16 of a fragment stands at its step 0, bits 5 and 6 exchanged with those of k16.
  const std::uint32_t at = fragment_address(shared.d_dot().address, warp, lane, 0);
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    stmatrix_x4(at ^ 32 * k16, d_dot[4 * k16], d_dot[4 * k16 + 1], d_dot[4 * k16 + 2],
                d_dot[4 * k16 + 3]);
  }
  fence_proxy_async_shared();
  bar_sync<128>(kImageBarrier);

  float sums[kChunks][32];
  const std::uint64_t image = descriptor_mn_major(shared.d_dot().address);
  const std::uint64_t q = descriptor_mn_major(shared.q().address);
  wgmma_fence();
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
    for (int k16 = 0; k16 < 4; ++k16) {
      wgmma_m64n64k16<Major::MN, Major::MN>(sums[chunk], descriptor_offset(image, 2048 * k16),
                                            descriptor_offset(q, chunk * kChunkBytes + 2048 * k16),
                                            k16 > 0);
    }
    wgmma_commit();
  }
  wgmma_wait<kChunks - 1>();
  wgmma_pin(dq);
  wgmma_pin(d_dot);
  wgmma_pin(sums[0]);
  shared.empty()[stage].arrive_warp();
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    if (chunk > 0) {
      wgmma_wait<0>();
      wgmma_pin(sums[chunk]);
    }
    shared.sums_free()[chunk].wait(parity ^ 1, "multiply", 10 + chunk);
    store_sums(shared.sums()[chunk], warp, lane, sums[chunk]);
    shared.sums_full()[chunk].arrive_warp();
  }
}

// Stores what the item has summed up: d[4 j + 2 r + e] is column 8 j + 2 (lane % 4) + e of head
// lane / 4 + 8 r of the warp's 16.
template <int kChunks>
__device__ __forceinline__ void store_item(const Params& p, const Item& item, int warp, int lane,
                                           const float (&d_weight)[2],
                                           const float (&dq)[32 * kChunks]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int head = item.first_head + 16 * warp + lane / 4 + 8 * r;
    const bool exists = head < p.view.h;
    const std::int64_t query = item.entries.query;
    const float sum = quad_sum(d_weight[r]);
    if (exists && lane % 4 == 0) {
      const std::int64_t at = query * p.d_weights_stride + head;
      if (p.d_weights_f32) {
        reinterpret_cast<float*>(p.d_weights)[at] = sum;
      } else {
        reinterpret_cast<__nv_bfloat16*>(p.d_weights)[at] = __float2bfloat16_rn(sum);
      }
    }
    const std::int64_t at = query * p.dq_stride0 + head * p.dq_stride1;
    if (p.dq_f32) {
      if (!exists) continue;
      float* const to = reinterpret_cast<float*>(p.dq) + at + 2 * (lane % 4);
#pragma unroll
      for (int j = 0; j < 8 * kChunks; ++j) {
        *reinterpret_cast<float2*>(to + 8 * j) = {dq[4 * j + 2 * r], dq[4 * j + 2 * r + 1]};
      }
      continue;
    }
    // A quad holds 32 columns as 4 blocks of 8, two columns a lane; transposed, each lane has one
    // block, 16 bytes.
    char* const to = p.dq + 2 * (at + 8 * (lane % 4));
#pragma unroll
    for (int part = 0; part < 2 * kChunks; ++part) {
      std::uint32_t w[4];
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const int i = 4 * (4 * part + b) + 2 * r;
        w[b] = pack_bf16(dq[i], dq[i + 1]);
      }
      quad_transpose(w, lane);
      if (exists) store_streaming(to + 64 * part, w[0], w[1], w[2], w[3]);
    }
  }
}

template <int kChunks>
__device__ __forceinline__ void multiply(const Params& p, Plan<kChunks> shared) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  PipelineState<Plan<kChunks>::kStages> ring;
  std::uint32_t tile_parity = 0, q_parity = 0;
  Item item;
  for (unsigned number = blockIdx.x; locate(p, number, item); number += gridDim.x) {
    float weight[2], d_weight[2] = {0.0f, 0.0f};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int head = item.first_head + 16 * warp + lane / 4 + 8 * r;
      weight[r] = head < p.view.h ? chosen_sm90::weight_of(p.view, item.entries.query, head) : 0.0f;
    }
    float dq[32 * kChunks];
#pragma unroll
    for (int i = 0; i < 32 * kChunks; ++i) dq[i] = 0.0f;
    const int tiles = item.entries.tiles();
    if (tiles > 0) shared.q_full().wait(q_parity, "multiply", 20);
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      shared.full()[ring.stage].wait(ring.parity, "multiply", ring.stage);
      multiply_tile<kChunks>(shared, ring.stage, tile_parity, weight, d_weight, dq);
      ring.advance();
      tile_parity ^= 1;
    }
    if (tiles > 0) {
      shared.q_free().arrive_warp();
      q_parity ^= 1;
    }
    store_item<kChunks>(p, item, warp, lane, d_weight, dq);
  }
}

// ---- Drain -------------------------------------------------------------------------------------

// Adds 64 columns of a tile's sums, those from `column` on, to this warp's 32 rows of dk: 16 lanes
// to 256 bytes of a row.
__device__ __forceinline__ void drain_floats(const Params& p, Place<Sums> sums,
                                             Place<std::int32_t[kTileEntries]> targets, int column,
                                             int warp, int lane) {
  constexpr int kBatch = 8;
  float* const dk = p.dk + column + 4 * (lane % 16);
#pragma unroll
  for (int first = 0; first < 16; first += kBatch) {
    int target[kBatch];
    int4 value[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int entry = 32 * warp + 2 * (first + i) + lane / 16;
      target[i] = targets[entry].load();
      value[i] = ld_shared_v4(sums[entry][4 * (lane % 16)].address);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (target[i] < 0) continue;
      reduce_add(dk + target[i] * p.dk_stride,
                 make_float4(__int_as_float(value[i].x), __int_as_float(value[i].y),
                             __int_as_float(value[i].z), __int_as_float(value[i].w)));
    }
  }
}

// The same in integers: a lane adds columns `lane` and `lane + 32` of one row after the other.
template <int kChunks>
__device__ __forceinline__ void drain_integers(const Params& p, Place<Sums> sums,
                                               Place<std::int32_t[kTileEntries]> targets,
                                               int column, int warp, int lane) {
  const std::uint64_t policy = policy_evict_normal();
#pragma unroll 8
  for (int i = 0; i < 32; ++i) {
    const int entry = 32 * warp + i;
    const int target = targets[entry].load();
    if (target < 0) continue;
    const float scale = __ldg(p.scales + target);
    unsigned long long* const to =
        p.fixed + static_cast<std::int64_t>(target) * (64 * kChunks) + column + lane;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = sums[entry][32 * half + lane].load();
      reduce_add(to + 32 * half, static_cast<unsigned long long>(__float2ll_rn(sum * scale)),
                 policy);
    }
  }
}

template <int kChunks, bool kFixed>
__device__ __forceinline__ void drain(const Params& p, Plan<kChunks> shared, int warp) {
  const int lane = threadIdx.x % 32;
  std::uint32_t count = 0;
  Item item;
  for (unsigned number = blockIdx.x; locate(p, number, item); number += gridDim.x) {
#pragma unroll 1
    for (int left = item.entries.tiles(); left > 0; --left, ++count) {
      const auto targets = shared.targets()[count % kTargetTiles];
#pragma unroll 1
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        shared.sums_full()[chunk].wait(count % 2, "drain", chunk);
        const auto sums = shared.sums()[chunk];
        if constexpr (kFixed) {
          drain_integers<kChunks>(p, sums, targets, 64 * chunk, warp, lane);
        } else {
          drain_floats(p, sums, targets, 64 * chunk, warp, lane);
        }
        shared.sums_free()[chunk].arrive_warp();
      }
    }
  }
}

// ---- The block ---------------------------------------------------------------------------------

template <int kChunks, bool kF8, bool kFixed>
__global__ void __launch_bounds__(kThreads, 2) backward_kernel(const __grid_constant__ Params p) {
  const Plan<kChunks> shared{shared_address(dynamic_shared<1024>())};
  if (threadIdx.x == 0) {
    if (shared.base % 1024 != 0) __trap();  // the swizzle is one of address bits
    for (int i = 0; i < Plan<kChunks>::kStages; ++i) {
      shared.full()[i].init(kGatherWarps * (32 + kWarpArrival));
      shared.empty()[i].init(kMultiplyWarps * kWarpArrival);
    }
    shared.q_full().init(kGatherWarps * 32);
    shared.q_free().init(kMultiplyWarps * kWarpArrival);
    for (int i = 0; i < kChunks; ++i) {
      shared.sums_full()[i].init(kMultiplyWarps * kWarpArrival);
      shared.sums_free()[i].init(kDrainWarps * kWarpArrival);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
  if (warp < kMultiplyWarps) {
    setmaxnreg_inc<kMultiplyRegisters>();
    multiply<kChunks>(p, shared);
  } else {
    setmaxnreg_dec<kOtherRegisters>();
    if (warp < kMultiplyWarps + kGatherWarps) {
      gather<kChunks, kF8>(p, shared, warp - kMultiplyWarps);
    } else {
      drain<kChunks, kFixed>(p, shared, warp - kMultiplyWarps - kGatherWarps);
    }
  }
}

// ---- Before ------------------------------------------------------------------------------------

struct NumberOf {
  __device__ static float of(const View& view, const char* row, int column) {
    return chosen_sm90::number_of(view, row, column);
  }
};

}  // namespace winnow::indexer::backward_sm90_detail
