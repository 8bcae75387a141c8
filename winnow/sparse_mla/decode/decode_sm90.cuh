// Decode, sm90: the kernels.
//
// An item is 64 heads of a query and a range of its tiles, those of the first cache before those of
// the second; the consumers are those of attention_sm90.cuh. The third warpgroup brings the rows:
// those in bf16 it copies by cp.async, those in f8 it loads into registers two groups of chunks
// ahead, turns into bf16 and stores in the layout that wgmma reads. It takes less time than the
// products do, since a pair of values costs four instructions: the bits of f8_e4m3, moved into
// those of bf16, are the value times 2^-120, subnormal numbers included, and one multiplication by
// scale * 2^120 rounds the result as the format says. Groups with scales that bf16 cannot hold, and
// those that hold a NaN, go a longer way to the same values.
//
// Where an item holds all tiles of its query it writes the output; otherwise a second kernel merges
// the items of each query, in order.
#pragma once

#include <cstdint>

#include "winnow/device/common/launch.cuh"
#include "winnow/sparse_mla/attention_sm90.cuh"
#include "winnow/sparse_mla/cache_view.cuh"

namespace winnow::sparse_mla::decode_sm90_detail {

using namespace winnow::sparse_mla::attention_sm90;

// Registers of a thread: 168 of each are there when the kernel begins, and an increase waits for
// what a decrease gives back, so that those of the three warpgroups must not exceed 504 together.
template <CacheFormat kFormat>
inline constexpr int kMultiplyRegisters = kFormat == CacheFormat::bf16 ? 200 : 192;
template <CacheFormat kFormat>
inline constexpr int kRowsRegisters = 3 * 168 - 2 * kMultiplyRegisters<kFormat>;

// A cache, and the rows that the queries chose of it. Strides count elements.
struct ChosenView {
  CacheView<const std::uint8_t> cache;
  FastDivmod of_block;  // divides a slot by the cache's block_size
  const std::int32_t* indices;
  std::int64_t indices_stride_b, indices_stride_s;
  const std::int32_t* topk_length;  // may be null
  std::int64_t topk_length_stride_b, topk_length_stride_s;
  std::int32_t topk, tiles;  // of `topk` entries
};

// A tensor [b, s_q, h_q, columns]. Strides count bytes.
struct HeadsView {
  char* data;
  std::int64_t stride_b, stride_s, stride_h;
  __device__ char* at(std::uint32_t i, std::uint32_t s, int h) const {
    return data + i * stride_b + s * stride_s + h * stride_h;
  }
};

struct KernelParams {
  ChosenView chosen[2];  // of the cache and of the extra one
  HeadsView q, out;
  HeadsView lse;           // data may be null
  const float* attn_sink;  // may be null
  std::int64_t attn_sink_stride;
  LogitScale scale;
  int h_q;
  std::uint32_t s_q, head_blocks, segments, items;  // items = b * s_q * segments * head_blocks
  int segment_tiles;
  // Of items of a query that has several segments: the output before its division by the sum, and
  // for each head the reference in base 2 and the sum.
  float* partial_out;    // [items, 64, 512]
  float2* partial_sums;  // [items, 64]
};

// --- items and tiles ----------------------------------------------------------------------------

struct Item {
  std::uint32_t i, s;  // sequence and query
  std::uint32_t segment;
  int first_head;
};
__device__ __forceinline__ Item item_of(const KernelParams& params, std::uint32_t item) {
  const std::uint32_t range = item / params.head_blocks;
  const std::uint32_t query = range / params.segments;
  return {query / params.s_q, query % params.s_q, range % params.segments,
          static_cast<int>(item % params.head_blocks) * kHeads};
}

// Entries that count of a query's lists.
struct EntryCounts {
  int counts[2];
};

// Those of the block's items are read once, when the kernel begins, and kept behind the rest of
// shared memory: whatever is written to the lengths meanwhile, all roles go by the same tiles.
inline constexpr int kMostItems = 1024;  // of a block
template <int kDim>
inline constexpr int kSharedBytes = Plan<kDim>::kBytes + kMostItems * 8;
static_assert(kSharedBytes<576> <= 232448 && Plan<576>::kBytes % 8 == 0 &&
              Plan<512>::kBytes % 8 == 0);

// A __syncthreads() follows.
__device__ __forceinline__ void read_entry_counts(const KernelParams& params,
                                                  std::uint32_t counts_at) {
  const std::uint32_t items = ceil_div(params.items - blockIdx.x, gridDim.x);
  for (std::uint32_t n = threadIdx.x; n < items; n += kThreads) {
    const Item at = item_of(params, blockIdx.x + n * gridDim.x);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const ChosenView& chosen = params.chosen[c];
      int count = chosen.topk;
      if (chosen.topk_length != nullptr) {
        const int length = __ldg(chosen.topk_length + at.i * chosen.topk_length_stride_b +
                                 at.s * chosen.topk_length_stride_s);
        count = min(max(length, 0), chosen.topk);
      }
      st_shared(counts_at + 8 * n + 4 * c, count);
    }
  }
}

__device__ __forceinline__ EntryCounts entry_counts(std::uint32_t counts_at, std::uint32_t item) {
  const std::uint32_t at = counts_at + 8 * ((item - blockIdx.x) / gridDim.x);
  return {static_cast<int>(ld_shared<std::uint32_t>(at)),
          static_cast<int>(ld_shared<std::uint32_t>(at + 4))};
}

// The tiles of an item that hold entries: from each list `tiles` of them, beginning with `first`.
struct ItemTiles {
  int first[2], tiles[2];
  __device__ int count() const { return tiles[0] + tiles[1]; }
};
__device__ __forceinline__ ItemTiles item_tiles(const KernelParams& params, std::uint32_t item,
                                                const EntryCounts& entries) {
  const int segment =
      static_cast<int>(item / params.head_blocks % params.segments) * params.segment_tiles;
  ItemTiles of;
  int before = 0;  // tiles of the lists before this one
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    of.first[c] = max(segment - before, 0);
    const int end = min(segment + params.segment_tiles - before, tile_count(entries.counts[c]));
    of.tiles[c] = max(end - of.first[c], 0);
    before += params.chosen[c].tiles;
  }
  return of;
}

// The tiles of the block's items in turn. The entries of a tile are loaded when the stream moves to
// it.
class TileStream {
 public:
  __device__ __forceinline__ TileStream(const KernelParams& params, std::uint32_t counts_at,
                                        int lane)
      : params_(params), counts_at_(counts_at), lane_(lane), item_(blockIdx.x) {
    begin_item();
    tile_ = -1;
  }

  // Moves to the next tile; false where there is none.
  __device__ __forceinline__ bool advance() {
    ++tile_;
    while (tile_ >= tiles_.count()) {
      if (item_ >= params_.items || params_.items - item_ <= gridDim.x) return false;
      item_ += gridDim.x;
      begin_item();
      tile_ = 0;
    }
    const bool second = tile_ >= tiles_.tiles[0];
    const ChosenView& chosen = params_.chosen[second];
    const std::int32_t* const row =
        chosen.indices + at_.i * chosen.indices_stride_b + at_.s * chosen.indices_stride_s;
    const int tile = second ? tiles_.first[1] + tile_ - tiles_.tiles[0] : tiles_.first[0] + tile_;
    entries_ =
        load_tile(row, tile, second ? entries_count_.counts[1] : entries_count_.counts[0], lane_);
    return true;
  }

  __device__ int cache() const { return tile_ >= tiles_.tiles[0]; }
  __device__ int slot() const { return tile_ & 1; }  // tile t belongs to consumer t % 2
  __device__ bool begins_item() const { return tile_ == 0; }
  __device__ std::uint32_t item() const { return item_; }
  __device__ const TileEntries& entries() const { return entries_; }

 private:
  __device__ __forceinline__ void begin_item() {
    at_ = item_of(params_, item_);
    entries_count_ = entry_counts(counts_at_, item_);
    tiles_ = item_tiles(params_, item_, entries_count_);
  }

  const KernelParams& params_;
  std::uint32_t counts_at_;
  int lane_;
  std::uint32_t item_;
  Item at_;
  EntryCounts entries_count_;
  ItemTiles tiles_;
  int tile_;
  TileEntries entries_;
};

// --- the warpgroup that brings the rows ---------------------------------------------------------

// Copies the heads of an item to sQ, and asks L2 for those of the block's next one.
template <int kDim>
__device__ __forceinline__ void load_item_queries(const KernelParams& params, std::uint32_t smem,
                                                  std::uint32_t item, int thread) {
  const Item at = item_of(params, item);
  const GatherRows heads = head_rows(params.q.at(at.i, at.s, 0), params.q.stride_h, at.first_head,
                                     thread, [&](int, int head) { return head < params.h_q; });
  load_queries<kDim>(smem, heads, thread, policy_evict_first());
  if (params.items - item > gridDim.x) {
    const Item next = item_of(params, item + gridDim.x);
    const int head = next.first_head + thread;
    if (thread < kHeads && head < params.h_q) {
      bulk_prefetch_l2(params.q.at(next.i, next.s, head), kDim * 2);
    }
  }
}

// The same once the consumers are through with the heads of the item before. It comes after the
// item's tile 0, not before: its slot is free before the last logits of the item before.
template <int kDim>
__device__ __forceinline__ void replace_queries(const KernelParams& params, std::uint32_t smem,
                                                std::uint32_t item, std::uint32_t q_uses,
                                                int thread) {
  mbarrier_wait(smem + Plan<kDim>::kQFree, (q_uses & 1) ^ 1, "rows", 0);
  load_item_queries<kDim>(params, smem, item, thread);
}

// bf16: the rows of a tile as load_tile_rows() wants them.
__device__ __forceinline__ GatherRows plain_rows(const KernelParams& params,
                                                 const TileStream& stream, std::uint64_t mask,
                                                 int thread) {
  const ChosenView& chosen = params.chosen[stream.cache()];
  GatherRows rows;
  rows.valid = 0;
#pragma unroll
  for (int pass = 0; pass < kGatherPasses; ++pass) {
    const int row = 16 * pass + thread / 8;
    const std::int32_t index =
        __shfl_sync(kFullWarp, pass < 2 ? stream.entries().low : stream.entries().high, row & 31);
    const bool valid = mask >> row & 1;
    const auto place = chosen.of_block.divide(valid ? index : 0);
    rows.source[pass] =
        reinterpret_cast<const char*>(chosen.cache.row(place.quotient, place.remainder)) +
        (thread & 7) * 16;
    rows.valid |= static_cast<std::uint32_t>(valid) << pass;
  }
  return rows;
}

template <int kDim>
__device__ __forceinline__ void copy_role(const KernelParams& params, std::uint32_t smem) {
  const int thread = threadIdx.x - 2 * 128;
  const std::uint64_t keep = policy_evict_last();
  TileStream stream(params, smem + Plan<kDim>::kBytes, thread & 31);
  std::uint32_t uses = 0;  // bit `slot`: the parity of the slot's barriers
  std::uint32_t q_uses = 0;
  for (bool more = stream.advance(); more;) {
    const std::uint64_t mask =
        tile_mask(stream.entries(), params.chosen[stream.cache()].cache.slots);
    const GatherRows rows = plain_rows(params, stream, mask, thread);
    const int slot = stream.slot();
    const bool begins = stream.begins_item();
    const std::uint32_t item = stream.item();
    more = stream.advance();
    if (slot == 0) {
      load_tile_rows<kDim, 0>(smem, uses & 1, rows, mask, thread, keep);
    } else {
      load_tile_rows<kDim, 1>(smem, uses >> 1, rows, mask, thread, keep);
    }
    uses ^= 1u << slot;
    if (begins) replace_queries<kDim>(params, smem, item, q_uses++, thread);
  }
}

// --- rows in f8 ---------------------------------------------------------------------------------

// A thread brings two rows of a tile, 8 * warp + lane / 4 and the one 32 below; of each chunk of
// f8, 16 of the 64 columns, which lanes 4 r to 4 r + 3 hold.
inline constexpr int kThreadRows = 2;

template <CacheFormat kFormat>
using RowOf = std::conditional_t<kFormat == CacheFormat::fp8_656, Row656, Row584>;

template <CacheFormat kFormat>
struct QuantisedTile {
  const std::uint8_t* row[kThreadRows];
  const std::uint8_t* scales_584[kThreadRows];
  std::uint64_t mask;
  std::uint32_t item;
  int slot;
  bool begins_item;

  __device__ bool valid(int r, int thread) const { return mask >> (32 * r + thread / 4) & 1; }
  // Those of two neighbouring chunks: an f32, or two ue8m0.
  __device__ std::uint32_t scale(int r, int chunk) const {
    if constexpr (kFormat == CacheFormat::fp8_656) {
      return __ldg(reinterpret_cast<const std::uint32_t*>(row[r] + Row656::kScaleOffset) +
                   chunk / 2);
    } else {
      return __ldg(reinterpret_cast<const std::uint16_t*>(scales_584[r]) + chunk / 2);
    }
  }
};

// The block of the row r of a thread in the stream's tile, and the offset in it.
__device__ __forceinline__ FastDivmod::Result thread_place(const ChosenView& chosen,
                                                           const TileStream& stream, int r,
                                                           int thread, bool valid) {
  const std::int32_t index =
      __shfl_sync(kFullWarp, r == 0 ? stream.entries().low : stream.entries().high, thread / 4);
  // An index is used only after the mask has vouched for it.
  return chosen.of_block.divide(valid ? index : 0);
}

// The tile that the stream has come to.
template <CacheFormat kFormat>
__device__ __forceinline__ QuantisedTile<kFormat> quantised_tile(const KernelParams& params,
                                                                 const TileStream& stream,
                                                                 int thread) {
  const ChosenView& chosen = params.chosen[stream.cache()];
  const CacheView<const std::uint8_t>& cache = chosen.cache;
  QuantisedTile<kFormat> tile;
  tile.mask = tile_mask(stream.entries(), cache.slots);
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) {
    const auto place = thread_place(chosen, stream, r, thread, tile.valid(r, thread));
    tile.row[r] = cache.row(place.quotient, place.remainder);
    if constexpr (kFormat == CacheFormat::fp8_584) {
      tile.scales_584[r] = cache.scales_584(place.quotient, place.remainder);
    }
  }
  tile.item = stream.item();
  tile.slot = stream.slot();
  tile.begins_item = stream.begins_item();
  return tile;
}

// Asks L2 for the rows of that tile.
template <CacheFormat kFormat>
__device__ __forceinline__ void prefetch_tile(const KernelParams& params, const TileStream& stream,
                                              int thread) {
  constexpr auto kRow = static_cast<std::uint32_t>(
      kFormat == CacheFormat::fp8_656 ? Row656::kBytes : Row584::kRowBytes);
  const ChosenView& chosen = params.chosen[stream.cache()];
  const CacheView<const std::uint8_t>& cache = chosen.cache;
  const std::uint64_t mask = tile_mask(stream.entries(), cache.slots);
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) {
    const bool valid = mask >> (32 * r + thread / 4) & 1;
    const auto place = thread_place(chosen, stream, r, thread, valid);
    if (valid && (thread & 3) == 0)
      bulk_prefetch_l2(cache.row(place.quotient, place.remainder), kRow);
  }
}

// The first two chunks of a group (group_chunk()); a third one is RoPE.
__device__ __forceinline__ int first_chunk(int slot, int group) {
  return 4 * (group < 2 ? slot : 1 - slot) + 2 * (group % 2);
}
// Whether the group's last chunk is that of RoPE: chunk 8 of 576 columns, 7 of 512.
template <int kDim>
__device__ __forceinline__ bool holds_rope(int slot, int group) {
  return kDim == 576 ? group == kGroups - 1 : first_chunk(slot, group) == 6;
}
// The arrivals of a group: one a warp, and one a thread with RoPE, which is copied.
template <int kDim>
__device__ __forceinline__ int quantised_group_arrivals(int slot, int group) {
  return kGatherThreads / 32 * kWarpArrival + (holds_rope<kDim>(slot, group) ? kGatherThreads : 0);
}

// What a thread has loaded of a group of chunks: 16 values of each of its rows and two chunks.
struct LoadedGroup {
  uint4 values[kThreadRows][2];
  std::uint32_t scale[kThreadRows];  // f32 of both chunks, or two of ue8m0
};

template <CacheFormat kFormat>
__device__ __forceinline__ void load_group(const QuantisedTile<kFormat>& tile, int group,
                                           int thread, LoadedGroup& loaded) {
  const int chunk = first_chunk(tile.slot, group);
  // In fp8_584 chunk 7 is RoPE.
  const bool second = kFormat == CacheFormat::fp8_656 || chunk != 6;
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) {
    const std::uint8_t* const from = tile.row[r] + kChunkColumns * chunk + 16 * (thread & 3);
    loaded.values[r][0] = loaded.values[r][1] = make_uint4(0, 0, 0, 0);
    loaded.scale[r] = 0;
    if (tile.valid(r, thread)) {
      loaded.values[r][0] = load_again(from);
      if (second) loaded.values[r][1] = load_again(from + kChunkColumns);
      loaded.scale[r] = tile.scale(r, chunk);
    }
  }
}

// The scale of chunk `c` of a loaded group.
template <CacheFormat kFormat>
__device__ __forceinline__ float group_scale(std::uint32_t loaded, int c) {
  if constexpr (kFormat == CacheFormat::fp8_656) return __uint_as_float(loaded);
  return ue8m0_to_f32(static_cast<std::uint8_t>(loaded >> (8 * c)));
}

inline constexpr float kFormatFactor = 0x1p120f;  // from the bits of f8_e4m3 in those of bf16

// Whether bf16 holds scale * 2^120.
__device__ __forceinline__ bool is_short(float scale) {
  const std::uint32_t bits = __float_as_uint(scale);
  constexpr std::uint32_t k256 = 0x43800000u;
  return (bits & 0xffffu) == 0 && (bits & 0x7fffffffu) < k256;
}

// A byte of the result has its highest bit set where that of the word, an f8_e4m3, is NaN.
__device__ __forceinline__ std::uint32_t find_nan(std::uint32_t word) {
  return (word & 0x7f7f7f7fu) + 0x01010101u;
}

// The bits of two f8_e4m3 in those of bf16: times 2^-120. kPair: bytes 0 and 1 of the word, or 2
// and 3. Each byte is widened with its sign, so that the sign stands in the highest bit after the
// shift too.
template <int kPair>
__device__ __forceinline__ std::uint32_t widen_f8(std::uint32_t word) {
  constexpr std::uint32_t kSelector = kPair == 0 ? 0x9180u : 0xb3a2u;
  return select_bytes<kSelector>(word) << 4 & 0x87f087f0u;
}

// The values of a word times a factor that bf16 holds, four of them.
__device__ __forceinline__ uint2 dequantise(std::uint32_t word, std::uint32_t factor) {
  return make_uint2(multiply_bf16x2(widen_f8<0>(word), factor),
                    multiply_bf16x2(widen_f8<1>(word), factor));
}

// The same with any scale and any values.
__device__ __forceinline__ uint2 dequantise_any(std::uint32_t word, float scale) {
  const std::uint32_t nan = find_nan(word);
  const auto value = [&](std::uint32_t pair, int half, int byte) {
    const float unscaled =
        __uint_as_float(half == 0 ? pair << 16 : pair & 0xffff0000u) * kFormatFactor;
    return nan >> (8 * byte + 7) & 1 ? __uint_as_float(0x7fffffffu) : unscaled * scale;
  };
  const std::uint32_t low = widen_f8<0>(word), high = widen_f8<1>(word);
  return make_uint2(pack_bf16(value(low, 0, 0), value(low, 1, 1)),
                    pack_bf16(value(high, 0, 2), value(high, 1, 3)));
}

// Turns a loaded group into bf16 in the chunks of a slot. The whole warp calls it.
template <CacheFormat kFormat>
__device__ __forceinline__ void store_group(std::uint32_t slot_at, int slot, int group, int thread,
                                            const LoadedGroup& loaded) {
  const int chunk = first_chunk(slot, group), piece = thread & 3;
  const bool second = kFormat == CacheFormat::fp8_656 || chunk != 6;
  std::uint32_t nan = 0;
  bool plain = true;
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const uint4& words = loaded.values[r][c];
      nan |= find_nan(words.x) | find_nan(words.y);
      nan |= find_nan(words.z) | find_nan(words.w);
      if (c == 0 || (kFormat == CacheFormat::fp8_584 && second)) {
        plain = plain && is_short(group_scale<kFormat>(loaded.scale[r], c));
      }
    }
  }
  plain = __all_sync(kFullWarp, plain && (nan & 0x80808080u) == 0);
  const auto store = [&](const auto& convert) {
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (c == 1 && !second) continue;
        const float scale = group_scale<kFormat>(loaded.scale[r], c);
        const uint4& words = loaded.values[r][c];
        const uint2 x = convert(words.x, scale), y = convert(words.y, scale),
                    z = convert(words.z, scale), w = convert(words.w, scale);
        const std::uint32_t to =
            slot_at + (chunk + c) * kChunkBytes + chunk_offset(32 * r + thread / 4, 2 * piece);
        st_shared(to, make_uint4(x.x, x.y, y.x, y.y));
        st_shared(to ^ 16, make_uint4(z.x, z.y, w.x, w.y));
      }
    }
  };
  if (plain) {
    store([](std::uint32_t word, float scale) {
      return dequantise(word, select_bytes<0x3232u>(__float_as_uint(scale * kFormatFactor)));
    });
  } else {
    store([](std::uint32_t word, float scale) { return dequantise_any(word, scale); });
  }
}

// Copies the RoPE columns of this thread's rows to their chunk.
template <CacheFormat kFormat, int kDim>
__device__ __forceinline__ void copy_rope(std::uint32_t slot_at, const QuantisedTile<kFormat>& tile,
                                          int thread, std::uint64_t policy) {
  constexpr int kChunk = kDim / kChunkColumns - 1;
  const int piece = thread & 3;
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = piece + 4 * half;
      cp_async_zfill(slot_at + kChunk * kChunkBytes + chunk_offset(32 * r + thread / 4, column),
                     tile.row[r] + RowOf<kFormat>::kRopeOffset + 16 * column, tile.valid(r, thread),
                     policy);
    }
  }
}

template <CacheFormat kFormat, int kDim>
__device__ __forceinline__ void dequantise_role(const KernelParams& params, std::uint32_t smem) {
  using P = Plan<kDim>;
  const int thread = threadIdx.x - 2 * 128;
  const std::uint64_t keep = policy_evict_last();
  TileStream stream(params, smem + Plan<kDim>::kBytes, thread & 31);
  std::uint32_t uses = 0;  // bit `slot`: the parity of the slot's barriers
  std::uint32_t q_uses = 0;

  if (!stream.advance()) return;
  QuantisedTile<kFormat> tile = quantised_tile<kFormat>(params, stream, thread);
  LoadedGroup loaded[2];  // of the groups to come
  load_group(tile, 0, thread, loaded[0]);
  load_group(tile, 1, thread, loaded[1]);
  // sQ is free before the first item.
  load_item_queries<kDim>(params, smem, tile.item, thread);
  bool more = stream.advance();
  for (;;) {
    if (more) prefetch_tile<kFormat>(params, stream, thread);
    QuantisedTile<kFormat> next;
    const bool exists = more;
    const std::uint32_t slot_at = smem + P::kK + tile.slot * P::kSlotBytes;
    const std::uint32_t parity = uses >> tile.slot & 1;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const std::uint32_t full = smem + P::kFull + 8 * (tile.slot * kGroups + group);
      mbarrier_wait(smem + P::kEmpty + 8 * (tile.slot * kGroups + group), parity ^ 1, "rows",
                    10 * tile.slot + group);
      if (holds_rope<kDim>(tile.slot, group)) {
        copy_rope<kFormat, kDim>(slot_at, tile, thread, keep);
        mbarrier_arrive_cp_async(full);
      }
      // The owner's warps read the last mask before they released the group just waited for.
      if (group == 0 && thread == 0) st_shared(smem + P::kMask + 8 * tile.slot, tile.mask);
      store_group<kFormat>(slot_at, tile.slot, group, thread, loaded[group % 2]);
      fence_proxy_async_shared();  // each writer, before the arrival that lets wgmma read
      mbarrier_arrive_warp(full);
      if (group < 2) {
        load_group(tile, group + 2, thread, loaded[group % 2]);
      } else if (exists) {
        if (group == 2) {
          next = quantised_tile<kFormat>(params, stream, thread);
          more = stream.advance();
        }
        load_group(next, group - 2, thread, loaded[group % 2]);
      }
    }
    uses ^= 1u << tile.slot;
    if (tile.begins_item) {
      if (q_uses > 0) replace_queries<kDim>(params, smem, tile.item, q_uses, thread);
      ++q_uses;
    }
    if (!exists) return;
    tile = next;
  }
}

// --- the consumers' items -----------------------------------------------------------------------

__device__ __forceinline__ float sink_of(const KernelParams& params, int head) {
  if (params.attn_sink == nullptr) return negative_infinity();
  return __ldg(params.attn_sink + head * params.attn_sink_stride) * kLog2e;
}

__device__ __forceinline__ void store_lse(const KernelParams& params, std::uint32_t i,
                                          std::uint32_t s, int head, float reference, float sum) {
  if (params.lse.data == nullptr) return;
  // log2(0) is -inf.
  *reinterpret_cast<float*>(params.lse.at(i, s, head)) = (reference + log2f(sum)) * kLn2;
}

// The items, as consumer_role() wants them.
struct Work {
  const KernelParams& params;
  std::uint32_t items, counts_at;

  __device__ __forceinline__ EntryCounts count(std::uint32_t item) const {
    return entry_counts(counts_at, item);
  }
  __device__ __forceinline__ int tiles(std::uint32_t item, const EntryCounts& entries) const {
    return item_tiles(params, item, entries).count();
  }

  // Writes the consumer's half of the item's output, and consumer 0 what else there is of a head.
  template <int kConsumer>
  __device__ __forceinline__ void store(std::uint32_t item, int warp, int lane,
                                        const RowState& state, const Output& o) const {
    const Item at = item_of(params, item);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = 16 * warp + lane / 4 + 8 * r;
      const int head = at.first_head + row;
      const bool exists = head < params.h_q;
      const bool tells = kConsumer == 0 && exists && (lane & 3) == 0;
      if (params.segments == 1) {
        const float sink = exists ? sink_of(params, head) : negative_infinity();
        if (tells) store_lse(params, at.i, at.s, head, state.reference[r], state.sum[r]);
        store_output_row<kConsumer>(params.out.at(at.i, at.s, exists ? head : 0), exists, r,
                                    output_factor(state.sum[r], state.reference[r], sink), lane, o);
        continue;
      }
      const std::int64_t part = std::int64_t{item} * kHeads + row;
      if (tells) params.partial_sums[part] = make_float2(state.reference[r], state.sum[r]);
      float* const to =
          params.partial_out + part * kValueColumns + kConsumer * 256 + 2 * (lane & 3);
      if (!exists) continue;
#pragma unroll
      for (int piece = 0; piece < 2; ++piece) {
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          *reinterpret_cast<float2*>(to + 128 * piece + 8 * j) =
              make_float2(o[piece][4 * j + 2 * r], o[piece][4 * j + 2 * r + 1]);
        }
      }
    }
  }
};

// --- kernels ------------------------------------------------------------------------------------

template <CacheFormat kFormat, int kDim>
__global__ void __launch_bounds__(kThreads, 1)
    decode_kernel(const __grid_constant__ KernelParams params) {
  const std::uint32_t smem = shared_address(dynamic_shared<1024>());
  constexpr bool kCopied = kFormat == CacheFormat::bf16;
  allow_next_kernel();  // that of the merge, which waits for this one
  if (threadIdx.x == 0) {
    init_barriers<kDim>(smem, [](int slot, int group) {
      return kCopied ? copied_group_arrivals(group) : quantised_group_arrivals<kDim>(slot, group);
    });
    fence_mbarrier_init();
  }
  const std::uint32_t counts_at = smem + Plan<kDim>::kBytes;
  read_entry_counts(params, counts_at);
  __syncthreads();

  // Each role is one branch, as setmaxnreg wants it.
  const Work work{params, params.items, counts_at};
  const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    setmaxnreg_inc<kMultiplyRegisters<kFormat>>();
    consumer_role<kDim, 0>(work, params.scale, smem);
  } else if (warpgroup == 1) {
    setmaxnreg_inc<kMultiplyRegisters<kFormat>>();
    consumer_role<kDim, 1>(work, params.scale, smem);
  } else {
    setmaxnreg_dec<kRowsRegisters<kFormat>>();
    if constexpr (kCopied) {
      copy_role<kDim>(params, smem);
    } else {
      dequantise_role<kFormat, kDim>(params, smem);
    }
  }
}

inline constexpr int kMergeThreads = 128;  // four columns each

// Adds up the segments of a query and a head, a block for each, heads first.
__global__ void __launch_bounds__(kMergeThreads)
    merge_kernel(const __grid_constant__ KernelParams params) {
  wait_for_kernel_before();
  const int head = static_cast<int>(blockIdx.x) % params.h_q;
  const std::uint32_t query = blockIdx.x / static_cast<std::uint32_t>(params.h_q);
  const std::uint32_t i = query / params.s_q, s = query % params.s_q;
  const auto part_of = [&](std::uint32_t segment) {
    const std::int64_t item =
        (std::int64_t{query} * params.segments + segment) * params.head_blocks + head / kHeads;
    return item * kHeads + head % kHeads;
  };
  float reference = kNoReference;
  for (std::uint32_t segment = 0; segment < params.segments; ++segment) {
    reference = fmaxf(reference, params.partial_sums[part_of(segment)].x);
  }
  float sum = 0;
  float4 all = make_float4(0, 0, 0, 0);
#pragma unroll 4
  for (std::uint32_t segment = 0; segment < params.segments; ++segment) {
    const std::int64_t part = part_of(segment);
    const float2 sums = params.partial_sums[part];
    const float4 o = *reinterpret_cast<const float4*>(params.partial_out + part * kValueColumns +
                                                      4 * threadIdx.x);
    const float factor = ex2(sums.x - reference);
    sum = fmaf(sums.y, factor, sum);
    all.x = fmaf(o.x, factor, all.x);
    all.y = fmaf(o.y, factor, all.y);
    all.z = fmaf(o.z, factor, all.z);
    all.w = fmaf(o.w, factor, all.w);
  }
  const float factor = output_factor(sum, reference, sink_of(params, head));
  *reinterpret_cast<uint2*>(params.out.at(i, s, head) + 8 * threadIdx.x) = make_uint2(
      pack_bf16(all.x * factor, all.y * factor), pack_bf16(all.z * factor, all.w * factor));
  if (threadIdx.x == 0) store_lse(params, i, s, head, reference, sum);
}

}  // namespace winnow::sparse_mla::decode_sm90_detail
