// Scores at given rows, sm90: the gather of the rows limits the speed, so a block keeps as many of
// them under way as its shared memory holds, and two blocks share a multiprocessor.
//
// A persistent block takes items: a query, and a part of its tiles of 64 entries.
//
//   gather    four warps  the heads of an item, and its rows, tile by tile, into a ring
//   multiply  four warps  products of 64 rows with all heads; ReLU, weighted sums, the scores
//
//   rows  --gather--> ring (full, empty)                     --multiply--> scores
//   heads --gather--> two buffers (heads_full, heads_empty)  --multiply
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
#include "winnow/indexer/gather_sm90.cuh"

namespace winnow::indexer::scores_at_sm90 {

using namespace winnow::device;
using chosen_sm90::Entries;
using chosen_sm90::kTileEntries;

inline constexpr int kThreads = 256;  // a warpgroup that multiplies and one that gathers
inline constexpr int kWarps = 4;      // of each of them
inline constexpr int kMultiplyRegisters = 184;
inline constexpr int kGatherRegisters = 72;
static_assert(2 * (kMultiplyRegisters + kGatherRegisters) == 512);  // all registers, for two blocks

// kHeads: the heads, padded to 64 or 128 (to 128 with f8_e4m3); kMasked: there is padding; kChunks:
// chunks of 128 bytes in a row.
template <bool kIsF8, int kPaddedHeads, bool kHasFewer, int kRowChunks>
struct Shape {
  static constexpr bool kF8 = kIsF8;
  static constexpr int kHeads = kPaddedHeads;
  static constexpr bool kMasked = kHasFewer;
  static constexpr int kChunks = kRowChunks;
};

struct Params {
  chosen_sm90::View view;
  float* scores;  // [s_q, columns]
  std::int64_t scores_stride;
  int splits;  // items that a query is cut into
};

template <class Shape>
struct Layout {
  static constexpr int kLimit = 115712 - 640;  // of half an SM, less barriers and masks
  static constexpr int kFitting =
      (kLimit / kChunkBytes - 2 * Shape::kChunks * Shape::kHeads / 64) / Shape::kChunks;
  static constexpr int kStages = kFitting < 8 ? kFitting : 8;

  Chunk rows[kStages][Shape::kChunks];
  Chunk heads[2][Shape::kChunks][Shape::kHeads / 64];  // [buffers][chunks][blocks of 64 heads]
  // Who arrives:
  Barrier full[kStages];   // each lane of gather with its copies, each warp with mask and scales
  Barrier empty[kStages];  // each warp of multiply
  Barrier heads_full[2];   // each lane of gather with its copies
  Barrier heads_empty[2];  // each warp of multiply
  float k_scale[Shape::kF8 ? kStages : 1][kTileEntries];  // only with f8_e4m3
  std::uint16_t mask[kStages][kWarps];                    // bit r: entry 16 w + r is there
};

template <class Shape>
struct Plan : Shared<Layout<Shape>> {
  using Memory = Layout<Shape>;
  static constexpr int kStages = Memory::kStages;
  static constexpr int kBytes = sizeof(Memory);
  static_assert(kStages >= 2 && kBytes <= 115712 && offsetof(Memory, mask) % 8 == 0);

  WINNOW_PLACE(rows)
  WINNOW_PLACE(heads)
  WINNOW_PLACE(full)
  WINNOW_PLACE(empty)
  WINNOW_PLACE(heads_full)
  WINNOW_PLACE(heads_empty)
  WINNOW_PLACE(k_scale)
  WINNOW_PLACE(mask)
};
inline constexpr int kFullArrivals = kWarps * 32 + kWarps * kWarpArrival;

// The tiles [tile, end) of a query.
struct Item {
  Entries entries;
  int tile, end;
};
__device__ __forceinline__ bool next_item(const Params& p, int& number, Item& item) {
  if (number >= p.view.s_q * p.splits) return false;
  item.entries = chosen_sm90::entries_of(p.view, number / p.splits);
  // Every column gets a score, even one whose row the query does not see.
  item.entries.first = 0;
  item.entries.entries = p.view.columns;
  const int tiles = item.entries.tiles(), split = number % p.splits;
  item.tile = static_cast<int>(std::int64_t{tiles} * split / p.splits);
  item.end = static_cast<int>(std::int64_t{tiles} * (split + 1) / p.splits);
  number += static_cast<int>(gridDim.x);
  return true;
}

// ---- Gather ------------------------------------------------------------------------------------

template <class Shape>
__device__ __forceinline__ void gather(const Params& p, Plan<Shape> shared) {
  constexpr int kWarpRows = kTileEntries / kWarps;
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const chosen_sm90::View& view = p.view;
  const std::uint64_t once = policy_evict_first(), keep = policy_evict_last();
  PipelineState<Plan<Shape>::kStages> ring;
  PipelineState<2> buffer;
  int number = static_cast<int>(blockIdx.x);
  Item item;
  bool more = next_item(p, number, item);
  // The index of this lane's entry in the next tile is loaded while this tile is copied.
  const auto load_index = [&](int tile) {
    const int entry = tile * kTileEntries + kWarpRows * warp + lane;
    return lane < kWarpRows ? chosen_sm90::index_of_entry(view, item.entries, entry) : -1;
  };
  int index = more ? load_index(item.tile) : -1;
  while (more) {
    const int query = item.entries.query;
    shared.heads_empty()[buffer.stage].wait(buffer.parity ^ 1, "heads", buffer.stage);
#pragma unroll
    for (int block = 0; block < Shape::kHeads / 64; ++block) {
      const int head = 64 * block + kWarpRows * warp + lane;
      chosen_sm90::copy_rows<kWarps, Shape::kChunks>(
          shared.heads()[buffer.stage][0][block].address, Shape::kHeads * 128,
          view.q + query * view.q_stride0, view.q_stride1, view.row_bytes,
          head < view.h ? head : -1, warp, once);
    }
    shared.heads_full()[buffer.stage].arrive_cp_async();
    buffer.advance();
    for (int tile = item.tile, end = item.end; tile < end; ++tile) {
      const int row = item.entries.row(index);
      if (tile + 1 < end) {
        index = load_index(tile + 1);
      } else {
        more = next_item(p, number, item);
        index = more ? load_index(item.tile) : -1;
      }
      const unsigned mask = __ballot_sync(kFullWarp, row >= 0);
      const auto full = shared.full()[ring.stage];
      float k_scale = 1.0f;
      if (Shape::kF8 && row >= 0) k_scale = __ldg(view.k_scale + row * view.k_scale_stride);
      shared.empty()[ring.stage].wait(ring.parity ^ 1, "gather", ring.stage);
      if (Shape::kF8 && lane < kWarpRows) {
        shared.k_scale()[ring.stage][kWarpRows * warp + lane].store(k_scale);
      }
      if (lane == 0) {
        shared.mask()[ring.stage][warp].store(static_cast<std::uint16_t>(mask));
      }
      full.arrive_warp();
      chosen_sm90::copy_rows<kWarps, Shape::kChunks>(shared.rows()[ring.stage].address, kChunkBytes,
                                                     view.k, view.k_row_stride, view.row_bytes, row,
                                                     warp, keep);
      full.arrive_cp_async();
      ring.advance();
    }
  }
}

// ---- Multiply ----------------------------------------------------------------------------------

// Weights of the heads whose products this lane holds: 8 (n / 2) + 2 (lane % 4) + n % 2.
template <class Shape>
__device__ __forceinline__ void load_weights(const chosen_sm90::View& view, int query,
                                             float (&weight)[Shape::kHeads / 4]) {
#pragma unroll
  for (int n = 0; n < Shape::kHeads / 4; ++n) {
    const int head = n / 2 * 8 + threadIdx.x % 4 * 2 + n % 2;
    const bool exists = query < view.s_q && (!Shape::kMasked || head < view.h);
    weight[n] = exists ? chosen_sm90::weight_of(view, query, head) : 0.0f;
  }
}

// d[64 rows x kHeads]: the products of the rows and the heads at these addresses.
template <class Shape>
__device__ __forceinline__ void multiply_tile(std::uint32_t rows, std::uint32_t heads,
                                              float (&d)[Shape::kHeads / 2]) {
  const std::uint64_t a = descriptor_k_major(rows), b = descriptor_k_major(heads);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < 4 * Shape::kChunks; ++step) {
    const std::uint64_t at = descriptor_offset(a, step / 4 * kChunkBytes + step % 4 * 32);
    const std::uint64_t bt = descriptor_offset(b, step / 4 * Shape::kHeads * 128 + step % 4 * 32);
    if constexpr (Shape::kF8) {
      wgmma_m64n128k32_f8(d, at, bt, step > 0);
    } else if constexpr (Shape::kHeads == 128) {
      wgmma_m64n128k16<Major::K, Major::K>(d, at, bt, step > 0);
    } else {
      wgmma_m64n64k16<Major::K, Major::K>(d, at, bt, step > 0);
    }
  }
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_pin(d);
}

template <class Shape>
__device__ __forceinline__ void multiply(const Params& p, Plan<Shape> shared) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const chosen_sm90::View& view = p.view;
  PipelineState<Plan<Shape>::kStages> ring;
  PipelineState<2> buffer;
  int number = static_cast<int>(blockIdx.x);
  Item item;
  float weight[Shape::kHeads / 4];
  while (next_item(p, number, item)) {
    load_weights<Shape>(view, item.entries.query, weight);
    shared.heads_full()[buffer.stage].wait(buffer.parity, "heads", buffer.stage);
    const std::uint32_t heads = shared.heads()[buffer.stage].address;
#pragma unroll 1
    for (int tile = item.tile; tile < item.end; ++tile) {
      shared.full()[ring.stage].wait(ring.parity, "multiply", ring.stage);
      float dots[Shape::kHeads / 2];
      multiply_tile<Shape>(shared.rows()[ring.stage].address, heads, dots);
      // This lane has rows lane / 4 and lane / 4 + 8 of the warp's 16.
      const auto mask = static_cast<std::uint32_t>(
          ld_shared<std::uint64_t>(shared.mask()[ring.stage].address) >> (16 * warp));
      float k_scale[2] = {1.0f, 1.0f};
      if constexpr (Shape::kF8) {
        const auto mine = shared.k_scale()[ring.stage][16 * warp + lane / 4];
#pragma unroll
        for (int r = 0; r < 2; ++r) k_scale[r] = (mine + 8 * r).load();
      }
      shared.empty()[ring.stage].arrive_warp();
      ring.advance();
      float sum[2] = {0.0f, 0.0f};
#pragma unroll
      for (int n = 0; n < Shape::kHeads / 4; ++n) {
        // A padded head counts nothing, also where a key holds infinities.
        const bool counts = !Shape::kMasked || n / 2 * 8 + lane % 4 * 2 + n % 2 < view.h;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float next = fmaf(weight[n], relu(dots[n / 2 * 4 + 2 * r + n % 2]), sum[r]);
          if (counts) sum[r] = next;
        }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) sum[r] = quad_sum(sum[r]);
      // Lanes 0 and 1 of a quad store.
      const int r = lane % 4, local = 16 * warp + lane / 4 + 8 * r;
      const int entry = tile * kTileEntries + local;
      if (r < 2 && entry < view.columns) {
        float score = r == 0 ? sum[0] : sum[1];
        const bool present = mask >> (lane / 4 + 8 * r) & 1;
        if constexpr (Shape::kF8) score *= r == 0 ? k_scale[0] : k_scale[1];
        p.scores[item.entries.query * p.scores_stride + entry] =
            present ? score + 0.0f : negative_infinity();
      }
    }
    shared.heads_empty()[buffer.stage].arrive_warp();
    buffer.advance();
  }
}

template <class Shape>
__global__ void __launch_bounds__(kThreads, 2) scores_at_kernel(const __grid_constant__ Params p) {
  const Plan<Shape> shared{shared_address(dynamic_shared<1024>())};
  if (threadIdx.x == 0) {
    if (shared.base % 1024 != 0) __trap();  // the swizzle uses address bits
    for (int i = 0; i < Plan<Shape>::kStages; ++i) {
      shared.full()[i].init(kFullArrivals);
      shared.empty()[i].init(kWarps * kWarpArrival);
    }
    for (int i = 0; i < 2; ++i) {
      shared.heads_full()[i].init(kWarps * 32);
      shared.heads_empty()[i].init(kWarps * kWarpArrival);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  if (__shfl_sync(kFullWarp, threadIdx.x / 128, 0) == 0) {
    setmaxnreg_inc<kMultiplyRegisters>();
    multiply<Shape>(p, shared);
  } else {
    setmaxnreg_dec<kGatherRegisters>();
    gather<Shape>(p, shared);
  }
}

}  // namespace winnow::indexer::scores_at_sm90
