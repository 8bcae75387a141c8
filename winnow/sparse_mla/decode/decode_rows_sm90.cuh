// Decode, sm90: the warpgroup that brings the rows.
//
// Rows in bf16 it copies by cp.async. Those in f8 it loads into registers kAhead groups of chunks
// ahead, turns into bf16 and stores in the layout that wgmma reads. It takes less time than the
// products do, since a pair of values costs four instructions: the bits of f8_e4m3, moved into
// those of bf16, are the value times 2^-120, subnormal numbers included, and one multiplication by
// scale * 2^120 rounds the result as the format says. Groups with scales that bf16 cannot hold, and
// those that hold a NaN, go a longer way to the same values.
//
// What decides the speed is that the loads of rows to come stay under way. No fence may stand among
// them: the consumers have the one between these stores and wgmma.
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
inline constexpr int kAhead = 3;  // groups that are loaded before the one that is stored

template <CacheFormat kFormat>
using RowOf = std::conditional_t<kFormat == CacheFormat::fp8_656, Row656, Row584>;

// The entries of a thread's rows.
struct ThreadEntries {
  std::int32_t of[kThreadRows];
};
__device__ __forceinline__ ThreadEntries thread_entries(const TileStream& stream, int thread) {
  ThreadEntries entries;
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) {
    const int row = 32 * r + thread / 4;
    entries.of[r] = row < stream.entries() ? __ldg(stream.list() + row) : -1;
  }
  return entries;
}

// A thread's rows of a tile.
struct ThreadTile {
  const std::uint8_t* row[kThreadRows];
  // The scales of chunks 2 q and 2 q + 1, in lane q of each quad: an f32 or two of ue8m0.
  std::uint32_t scales[kThreadRows];
  std::uint32_t flags;  // bits 0 and 1: the rows are valid
  __device__ bool valid(int r) const { return flags >> r & 1; }
  __device__ int slot() const { return static_cast<int>(flags >> 2 & 1); }
  __device__ bool begins_piece() const { return flags >> 3 & 1; }
};

// Of the tile that the stream has come to. Begins to load the scales.
template <CacheFormat kFormat>
__device__ __forceinline__ ThreadTile thread_tile(const KernelParams& params,
                                                  const TileStream& stream,
                                                  const ThreadEntries& entries, int thread) {
  const ChosenView& chosen = params.chosen[stream.cache()];
  const CacheView<const std::uint8_t>& cache = chosen.cache;
  ThreadTile tile;
  tile.flags = static_cast<std::uint32_t>(stream.slot()) << 2 |
               static_cast<std::uint32_t>(stream.begins_piece()) << 3;
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) {
    // Unsigned, so that a negative entry is none either.
    const auto entry = static_cast<std::uint32_t>(entries.of[r]);
    const bool valid = entry < cache.slots;
    const auto place = chosen.of_block.divide(valid ? entry : 0);
    tile.row[r] = cache.row(place.quotient, place.remainder);
    tile.flags |= static_cast<std::uint32_t>(valid) << r;
    tile.scales[r] = 0;
    if (!valid) continue;
    if constexpr (kFormat == CacheFormat::fp8_656) {
      tile.scales[r] = __ldg(
          reinterpret_cast<const std::uint32_t*>(tile.row[r] + Row656::kScaleOffset) + thread % 4);
    } else {
      tile.scales[r] = __ldg(reinterpret_cast<const std::uint16_t*>(
                                 cache.scales_584(place.quotient, place.remainder)) +
                             thread % 4);
    }
  }
  return tile;
}

// Writes which of the warp's rows are valid to the tile's mask.
__device__ __forceinline__ void store_mask(std::uint32_t mask_at, const ThreadTile& tile,
                                           int thread) {
  // Lane k learns of the rows of lanes 4 k to 4 k + 3.
  const std::uint32_t flags = __shfl_sync(kFullWarp, tile.flags, 4 * (thread & 7));
  const std::uint32_t low = __ballot_sync(kFullWarp, flags & 1);
  const std::uint32_t high = __ballot_sync(kFullWarp, flags & 2);
  if ((thread & 31) != 0) return;
  st_shared(mask_at + thread / 32, static_cast<std::uint8_t>(low));
  st_shared(mask_at + 4 + thread / 32, static_cast<std::uint8_t>(high));
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
};

// In fp8_584 chunk 7 is RoPE, and no second one of its group.
template <CacheFormat kFormat>
__device__ __forceinline__ bool has_second(int chunk) {
  return kFormat == CacheFormat::fp8_656 || chunk != 6;
}

template <CacheFormat kFormat>
__device__ __forceinline__ void load_group(const ThreadTile& tile, int group, int thread,
                                           LoadedGroup& loaded) {
  const int chunk = first_chunk(tile.slot(), group);
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) {
    const std::uint8_t* const from = tile.row[r] + kChunkColumns * chunk + 16 * (thread & 3);
    loaded.values[r][0] = loaded.values[r][1] = make_uint4(0, 0, 0, 0);
    if (!tile.valid(r)) continue;
    loaded.values[r][0] = load_again(from);
    if (has_second<kFormat>(chunk)) loaded.values[r][1] = load_again(from + kChunkColumns);
  }
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
__device__ __forceinline__ void store_group(std::uint32_t slot_at, const ThreadTile& tile,
                                            int group, int thread, const LoadedGroup& loaded) {
  const int chunk = first_chunk(tile.slot(), group);
  const bool second = has_second<kFormat>(chunk);
  float scales[kThreadRows][2];
  std::uint32_t nan = 0;
  bool plain = true;
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) {
    const std::uint32_t both = __shfl_sync(kFullWarp, tile.scales[r], (thread & 28) | chunk / 2);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if constexpr (kFormat == CacheFormat::fp8_656) {
        scales[r][c] = __uint_as_float(both);
      } else {  // in the group with RoPE the second byte is padding
        scales[r][c] =
            c == 0 || second ? ue8m0_to_f32(static_cast<std::uint8_t>(both >> (8 * c))) : 0.0f;
      }
      const uint4& words = loaded.values[r][c];
      nan |= find_nan(words.x) | find_nan(words.y);
      nan |= find_nan(words.z) | find_nan(words.w);
      plain = plain && is_short(scales[r][c]);
    }
  }
  plain = __all_sync(kFullWarp, plain && (nan & 0x80808080u) == 0);
  const std::uint32_t thread_at =
      slot_at + chunk * kChunkBytes + chunk_offset(thread / 4, 2 * (thread & 3));
  // 32 rows further the swizzle is the same.
  const auto store = [&](int r, int c, const uint4& words, const auto& convert) {
    if (c == 1 && !second) return;
    const uint2 x = convert(words.x), y = convert(words.y), z = convert(words.z),
                w = convert(words.w);
    const std::uint32_t to = thread_at + c * kChunkBytes + r * 32 * 128;
    st_shared(to, make_uint4(x.x, x.y, y.x, y.y));
    st_shared(to ^ 16, make_uint4(z.x, z.y, w.x, w.y));
  };
  if (plain) {
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const std::uint32_t factor =
            select_bytes<0x3232u>(__float_as_uint(scales[r][c] * kFormatFactor));
        store(r, c, loaded.values[r][c],
              [&](std::uint32_t word) { return dequantise(word, factor); });
      }
    }
  } else {
    // One after the other, for it is rare and must not cost registers.
#pragma unroll 1
    for (int n = 0; n < 2 * kThreadRows; ++n) {
      const auto pick = [&](const auto(&of)[kThreadRows][2]) {
        return n == 0 ? of[0][0] : n == 1 ? of[0][1] : n == 2 ? of[1][0] : of[1][1];
      };
      const float scale = pick(scales);
      store(n / 2, n % 2, pick(loaded.values),
            [&](std::uint32_t word) { return dequantise_any(word, scale); });
    }
  }
}

// Copies the RoPE columns of this thread's rows to their chunk.
template <CacheFormat kFormat, int kDim>
__device__ __forceinline__ void copy_rope(std::uint32_t slot_at, const ThreadTile& tile, int thread,
                                          std::uint64_t policy) {
  constexpr int kChunk = kDim / kChunkColumns - 1;
  const int piece = thread & 3;
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = piece + 4 * half;
      cp_async_zfill(slot_at + kChunk * kChunkBytes + chunk_offset(32 * r + thread / 4, column),
                     tile.row[r] + RowOf<kFormat>::kRopeOffset + 16 * column, tile.valid(r),
                     policy);
    }
  }
}

template <CacheFormat kFormat, int kDim>
__device__ __forceinline__ void dequantise_role(const KernelParams& params, const Pieces& pieces,
                                                std::uint32_t smem) {
  using P = Plan<kDim>;
  const int thread = threadIdx.x - 2 * 128;
  TileStream stream(params, pieces);
  std::uint32_t uses = 0;  // bit `slot`: the parity of the slot's barriers
  std::uint32_t q_uses = 0;
  int piece = 0;  // of the tile that is stored

  if (!stream.advance()) return;
  piece = stream.piece();
  ThreadEntries entries = thread_entries(stream, thread);
  ThreadTile tile = thread_tile<kFormat>(params, stream, entries, thread);
  LoadedGroup loaded[kGroups];  // kAhead of them are under way
#pragma unroll
  for (int group = 0; group < kAhead; ++group) {
    load_group<kFormat>(tile, group, thread, loaded[group]);
  }
  // sQ is free before the first piece.
  load_piece_queries<kDim>(params, pieces, smem, piece, thread);
  bool more = stream.advance();
  if (more) entries = thread_entries(stream, thread);
  for (;;) {
    ThreadTile next;
    const bool exists = more;
    int next_piece = 0;
    const int slot = tile.slot();
    const std::uint32_t slot_at = smem + P::kK + slot * P::kSlotBytes;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const std::uint32_t full = smem + P::kFull + 8 * (slot * kGroups + group);
      mbarrier_wait(smem + P::kEmpty + 8 * (slot * kGroups + group), (uses >> slot & 1) ^ 1, "rows",
                    10 * slot + group);
      if (holds_rope<kDim>(slot, group)) {
        copy_rope<kFormat, kDim>(slot_at, tile, thread, policy_evict_last());
        mbarrier_arrive_cp_async(full);
      }
      // The owner's warps read the last mask before they released the group just waited for.
      if (group == 0) store_mask(smem + P::kMask + 8 * slot, tile, thread);
      store_group<kFormat>(slot_at, tile, group, thread, loaded[group]);
      mbarrier_arrive_warp(full);
      const int later = group + kAhead;
      if (later < kGroups) {
        load_group<kFormat>(tile, later, thread, loaded[later]);
      } else if (exists) {
        if (later == kGroups) {
          next = thread_tile<kFormat>(params, stream, entries, thread);
          next_piece = stream.piece();
          more = stream.advance();
          if (more) entries = thread_entries(stream, thread);
        }
        load_group<kFormat>(next, later - kGroups, thread, loaded[later - kGroups]);
      }
    }
    uses ^= 1u << slot;
    if (tile.begins_piece()) {
      if (q_uses > 0) replace_queries<kDim>(params, pieces, smem, piece, q_uses, thread);
      ++q_uses;
    }
    if (!exists) return;
    tile = next;
    piece = next_piece;
  }
}

}  // namespace winnow::sparse_mla::decode_sm90_detail
