// Top-k sparse MLA attention, backward, sm90: what the fused kernel works on, and how that is dealt
// out to its blocks.
#pragma once

#include <cstdint>

#include "winnow/device/common/math.cuh"
#include "winnow/device/common/shared.cuh"
#include "winnow/device/sm90/pipeline.cuh"
#include "winnow/device/sm90/places.cuh"
#include "winnow/sparse_mla/backward/backward_fixed_sm90.cuh"
#include "winnow/sparse_mla/backward/backward_sources_sm90.cuh"
#include "winnow/sparse_mla/gather_sm90.cuh"

namespace winnow::sparse_mla::backward_fused_sm90_detail {

using namespace winnow::device;

inline constexpr int kHeads = 64;  // of an item

// For each row of a tile: the row of the accumulator that it is added to, and with integer sums
// (FixedDrain) its scale.
using TargetList = Place<std::int32_t[kTileRows]>;
using ScaleList = Place<float[kTileRows]>;

struct KernelParams {
  GatherView kv;
  const char* q;
  std::int64_t q_stride0, q_stride1;  // bytes
  const char* d_out;
  std::int64_t d_out_stride0, d_out_stride1;  // bytes
  const float* lse;
  std::int64_t lse_stride;
  const char* out;
  std::int64_t out_stride0, out_stride1;  // bytes
  const float* delta;                     // null: dot(out, d_out), formed here
  std::int64_t delta_stride;
  const float* attn_sink;  // may be null
  std::int64_t attn_sink_stride;
  float* sink_share;  // [s_q, h_q]: what each query adds to d_sink; may be null
  char* dq;
  std::int64_t dq_stride0, dq_stride1;  // bytes
  bool dq_f32;
  float* dq_parts;  // [2 * blocks, kHeads, kDim]: dq of the tail's parts
  // [waste_row + blocks, kDim], columns permuted; the last rows take what absent entries add.
  float* dkv;
  // FixedDrain has these in the place of lse and dkv.
  const float* lse2;  // [s_q, kHeads]: base 2, with the sink; +inf: no gradient
  const backward_fixed_detail::RowState* row_states;  // [waste_row + blocks]
  unsigned long long* fixed;                          // [waste_row + blocks, kDim / 2]
  std::int32_t waste_row;                             // s_kv
  float scale, scale_log2;                            // of logits, natural and in base 2
  int h_q;
  std::uint32_t head_blocks, items;  // items = s_q * head_blocks, at most 2^30
  std::uint32_t rounds;              // in which every block has an item: items / blocks
  int tiles;                         // of a query: ceil(topk / 64); with ranges kTailShares
  // A counter, 0 at first, of the items that the blocks have begun. By it they wait for each other,
  // so that they share rows in the L2 cache; null: they do not wait.
  std::uint32_t* step;
};

// Tiles [first_tile, end_tile) of 64 heads of a query.
struct Item {
  std::uint32_t index, query;
  int first_head, first_tile, end_tile;
  int entries;  // of the query; tiles from ceil(entries / 64) on are empty
  int part;     // where in dq_parts dq goes; -1: to dq itself

  __device__ __forceinline__ int end() const { return min(end_tile, tile_count(entries)); }
};

// The block's part of the tail of the items (device/sm90/pipeline.cuh), in shared memory. What
// several blocks hold of one item is added by combine_kernel.
struct TailItem {
  std::uint32_t index;  // kNoItem: there is none
  int first_tile, end_tile, part;
};
static_assert(sizeof(TailItem) == 16);
inline constexpr std::uint32_t kNoItem = 0xffffffffu;

__device__ inline TailItem tail_item(const KernelParams& params, int which) {
  const TailRange range = tail_range(params.items, params.tiles, blockIdx.x, gridDim.x);
  TailItem item{kNoItem, 0, 0, -1};
  if (params.tiles == 0) {  // nothing to cut
    const std::uint32_t index = range.first + blockIdx.x;
    if (which == 0 && index < params.items) item.index = index;
    return item;
  }
  const std::int64_t nth = range.begin / params.tiles + which, from = nth * params.tiles;
  item.first_tile = static_cast<int>(max(range.begin - from, std::int64_t{0}));
  item.end_tile = static_cast<int>(min(range.end - from, std::int64_t{params.tiles}));
  if (item.first_tile >= item.end_tile) return item;
  item.index = range.first + static_cast<std::uint32_t>(nth);
  if (item.end_tile - item.first_tile < params.tiles) {
    item.part = 2 * static_cast<int>(blockIdx.x) + which;
  }
  return item;
}

// Where the tiles of a query are not known before it is looked at, items of the tail are cut into
// so many shares of them, which KernelParams and TailItem then have in the place of tiles.
inline constexpr int kTailShares = 32;

// The `number`-th item of this block; false past the last.
template <class Params>
__device__ __forceinline__ bool locate(const Params& params, Place<TailItem[2]> tail,
                                       std::uint32_t number, Item& item) {
  std::uint32_t index = number * gridDim.x + blockIdx.x;
  item.first_tile = 0;
  item.end_tile = params.tiles;
  item.part = -1;
  if (number >= params.rounds) {
    if (number > params.rounds + 1) return false;
    const int4 words = ld_shared_v4(tail[number - params.rounds].address);  // a TailItem
    index = static_cast<std::uint32_t>(words.x);
    item.first_tile = words.y;
    item.end_tile = words.z;
    item.part = words.w;
    if (index == kNoItem) return false;
  }
  item.index = index;
  item.query = index / params.head_blocks;
  item.first_head = static_cast<int>(index - item.query * params.head_blocks) * kHeads;
  item.entries = query_entries(params.kv, item.query);
  if constexpr (kHasRanges<Params>) {
    const int tiles = tile_count(item.entries);
    item.first_tile = tiles * item.first_tile / kTailShares;
    item.end_tile = tiles * item.end_tile / kTailShares;
  }
  return true;
}

// Adds the parts of dq that several blocks hold of the tail's items, in the order of the blocks.
// Each of the 64 heads of an item of the tail has a block.
inline constexpr int kCombineThreads = 192;
template <int kDim>
__global__ void __launch_bounds__(kCombineThreads)
    combine_kernel(const __grid_constant__ KernelParams params, std::uint32_t blocks) {
  const std::uint32_t nth = blockIdx.x / kHeads;
  const int block_head = blockIdx.x % kHeads;
  const std::uint32_t index = params.items - params.items % blocks + nth;
  const std::int64_t query = index / params.head_blocks;
  const int head = static_cast<int>(index % params.head_blocks) * kHeads + block_head;
  if (head >= params.h_q) return;
  const std::int64_t from = static_cast<std::int64_t>(nth) * params.tiles;
  // The blocks that have tiles of the item: from the block with its first tile to the last block
  // that begins before the item ends.
  const std::int64_t all = std::int64_t{params.items % blocks} * params.tiles;
  const auto first = static_cast<std::uint32_t>(((from + 1) * blocks - 1) / all);
  const auto end = static_cast<std::uint32_t>(((from + params.tiles) * blocks + all - 1) / all);
  const TailRange owner = tail_range(params.items, params.tiles, first, blocks);
  if (owner.begin <= from && owner.end >= from + params.tiles) return;  // it has stored dq
  float sum[kDim / kCombineThreads + 1] = {};
#pragma unroll 8
  for (std::uint32_t block = first; block < end; ++block) {
    const TailRange range = tail_range(params.items, params.tiles, block, blocks);
    const bool has_part = range.begin < range.end;
    const int part = 2 * static_cast<int>(block) + (range.begin < from ? 1 : 0);
    const float* row = params.dq_parts + (std::int64_t{part} * kHeads + block_head) * kDim;
#pragma unroll
    for (int i = 0; i * kCombineThreads < kDim; ++i) {
      const int column = i * kCombineThreads + threadIdx.x;
      if (has_part && column < kDim) sum[i] += __ldg(row + column);
    }
  }
  char* const to = params.dq + query * params.dq_stride0 + head * params.dq_stride1;
#pragma unroll
  for (int i = 0; i * kCombineThreads < kDim; ++i) {
    const int column = i * kCombineThreads + threadIdx.x;
    if (column >= kDim) continue;
    if (params.dq_f32) {
      reinterpret_cast<float*>(to)[column] = sum[i];
    } else {
      reinterpret_cast<std::uint16_t*>(to)[column] =
          static_cast<std::uint16_t>(pack_bf16(sum[i], 0.0f));
    }
  }
}

}  // namespace winnow::sparse_mla::backward_fused_sm90_detail
