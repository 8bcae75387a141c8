// Decode, sm90: the warpgroup that brings the rows.
//
// Rows in bf16 it copies by cp.async. Those in f8 it loads into registers two groups of chunks
// ahead, turns into bf16 and stores in the layout that wgmma reads. A pair of values costs four
// instructions: the bits of f8_e4m3, moved into those of bf16, are the value times 2^-120,
// subnormal numbers included, and one multiplication by scale * 2^120 rounds the result as the
// format says. Groups with scales that bf16 cannot hold, and those that hold a NaN, go a longer way
// to the same values.
#pragma once

#include <cstdint>
#include <type_traits>

#include "winnow/sparse_mla/decode/decode_pieces_sm90.cuh"

namespace winnow::sparse_mla::decode_sm90_detail {

// Copies the heads of a piece to sQ, and asks L2 for those of the block's next one.
template <int kDim>
__device__ __forceinline__ void load_piece_queries(const KernelParams& params, const Pieces& pieces,
                                                   std::uint32_t smem, int n, int thread) {
  const Piece at = pieces[n];
  const GatherRows heads = head_rows(params.q.at(at.i, at.s, 0), params.q.stride_h, at.first_head,
                                     thread, [&](int, int head) { return head < params.h_q; });
  load_queries<kDim>(smem, heads, thread, policy_evict_first());
  if (n + 1 < pieces.count()) {
    const Piece next = pieces[n + 1];
    const int head = next.first_head + thread;
    if (thread < kHeads && head < params.h_q) {
      bulk_prefetch_l2(params.q.at(next.i, next.s, head), kDim * 2);
    }
  }
}

// The same once the consumers are through with the heads of the piece before. It comes after the
// piece's tile 0, not before: its slot is free before the last logits of the piece before.
template <int kDim>
__device__ __forceinline__ void replace_queries(const KernelParams& params, const Pieces& pieces,
                                                std::uint32_t smem, int n, std::uint32_t q_uses,
                                                int thread) {
  mbarrier_wait(smem + Plan<kDim>::kQFree, (q_uses & 1) ^ 1, "rows", 0);
  load_piece_queries<kDim>(params, pieces, smem, n, thread);
}

// --- rows in bf16 -------------------------------------------------------------------------------

// The rows of a tile as load_tile_rows() wants them.
__device__ __forceinline__ GatherRows plain_rows(const ChosenView& chosen,
                                                 const TileEntries& entries, std::uint64_t mask,
                                                 int thread) {
  GatherRows rows;
  rows.valid = 0;
#pragma unroll
  for (int pass = 0; pass < kGatherPasses; ++pass) {
    const int row = 16 * pass + thread / 8;
    const std::int32_t index =
        __shfl_sync(kFullWarp, pass < 2 ? entries.low : entries.high, row & 31);
    const bool valid = mask >> row & 1;
    // An index is used only after the mask has vouched for it.
    const auto place = chosen.of_block.divide(valid ? index : 0);
    rows.source[pass] =
        reinterpret_cast<const char*>(chosen.cache.row(place.quotient, place.remainder)) +
        (thread & 7) * 16;
    rows.valid |= static_cast<std::uint32_t>(valid) << pass;
  }
  return rows;
}

template <int kDim>
__device__ __forceinline__ void copy_role(const KernelParams& params, const Pieces& pieces,
                                          std::uint32_t smem) {
  const int thread = threadIdx.x - 2 * 128;
  const int lane = thread & 31;
  const std::uint64_t keep = policy_evict_last();
  TileStream stream(params, pieces);
  std::uint32_t uses = 0;  // bit `slot`: the parity of the slot's barriers
  std::uint32_t q_uses = 0;
  TileEntries entries;  // of the stream's tile
  const auto advance = [&] {
    if (!stream.advance()) return false;
    entries = load_tile(stream.list(), 0, stream.entries(), lane);
    return true;
  };
  for (bool more = advance(); more;) {
    const ChosenView& chosen = params.chosen[stream.cache()];
    const std::uint64_t mask = tile_mask(entries, chosen.cache.slots);
    const GatherRows rows = plain_rows(chosen, entries, mask, thread);
    const int slot = stream.slot();
    const bool begins = stream.begins_piece();
    const int piece = stream.piece();
    more = advance();
    if (slot == 0) {
      load_tile_rows<kDim, 0>(smem, uses & 1, rows, mask, thread, keep);
    } else {
      load_tile_rows<kDim, 1>(smem, uses >> 1, rows, mask, thread, keep);
    }
    uses ^= 1u << slot;
    if (begins) replace_queries<kDim>(params, pieces, smem, piece, q_uses++, thread);
  }
}

// --- rows in f8 ---------------------------------------------------------------------------------

// A thread brings two rows of a tile, 8 * warp + lane / 4 and the one 32 below; of each chunk of
// f8, 16 of the 64 columns, which lanes 4 r to 4 r + 3 hold.
inline constexpr int kThreadRows = 2;

// The tiles of the block's pieces in turn, and their entries, which are loaded when the stream
// moves to a tile.
class EntryStream {
 public:
  __device__ __forceinline__ EntryStream(const KernelParams& params, const Pieces& pieces, int lane)
      : tiles_(params, pieces), lane_(lane) {}
  __device__ __forceinline__ bool advance() {
    if (!tiles_.advance()) return false;
    entries_ = load_tile(tiles_.list(), 0, tiles_.entries(), lane_);
    return true;
  }
  __device__ int cache() const { return tiles_.cache(); }
  __device__ int slot() const { return tiles_.slot(); }
  __device__ bool begins_piece() const { return tiles_.begins_piece(); }
  __device__ int piece() const { return tiles_.piece(); }
  __device__ const TileEntries& entries() const { return entries_; }

 private:
  TileStream tiles_;
  int lane_;
  TileEntries entries_{-1, -1};
};

template <CacheFormat kFormat>
using RowOf = std::conditional_t<kFormat == CacheFormat::fp8_656, Row656, Row584>;

template <CacheFormat kFormat>
struct QuantisedTile {
  const std::uint8_t* row[kThreadRows];
  const std::uint8_t* scales_584[kThreadRows];
  std::uint64_t mask;
  int piece;
  int slot;
  bool begins_piece;

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
                                                           const EntryStream& stream, int r,
                                                           int thread, bool valid) {
  const std::int32_t index =
      __shfl_sync(kFullWarp, r == 0 ? stream.entries().low : stream.entries().high, thread / 4);
  // An index is used only after the mask has vouched for it.
  return chosen.of_block.divide(valid ? index : 0);
}

// The tile that the stream has come to.
template <CacheFormat kFormat>
__device__ __forceinline__ QuantisedTile<kFormat> quantised_tile(const KernelParams& params,
                                                                 const EntryStream& stream,
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
  tile.piece = stream.piece();
  tile.slot = stream.slot();
  tile.begins_piece = stream.begins_piece();
  return tile;
}

// Asks L2 for the rows of that tile.
template <CacheFormat kFormat>
__device__ __forceinline__ void prefetch_tile(const KernelParams& params, const EntryStream& stream,
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
__device__ __forceinline__ void dequantise_role(const KernelParams& params, const Pieces& pieces,
                                                std::uint32_t smem) {
  using P = Plan<kDim>;
  const int thread = threadIdx.x - 2 * 128;
  const std::uint64_t keep = policy_evict_last();
  EntryStream stream(params, pieces, thread & 31);
  std::uint32_t uses = 0;  // bit `slot`: the parity of the slot's barriers
  std::uint32_t q_uses = 0;

  if (!stream.advance()) return;
  QuantisedTile<kFormat> tile = quantised_tile<kFormat>(params, stream, thread);
  LoadedGroup loaded[2];  // of the groups to come
  load_group(tile, 0, thread, loaded[0]);
  load_group(tile, 1, thread, loaded[1]);
  // sQ is free before the first piece.
  load_piece_queries<kDim>(params, pieces, smem, tile.piece, thread);
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
      mbarrier_arrive_warp(full);  // the consumers have the fence that lets wgmma read
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
    if (tile.begins_piece) {
      if (q_uses > 0) replace_queries<kDim>(params, pieces, smem, tile.piece, q_uses, thread);
      ++q_uses;
    }
    if (!exists) return;
    tile = next;
  }
}

}  // namespace winnow::sparse_mla::decode_sm90_detail
