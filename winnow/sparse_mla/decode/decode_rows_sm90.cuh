// Decode, sm90: the warps that copy queries and rows.
//
// Rows in bf16 go to where wgmma reads them. Of those in f8, 128 bytes go as they are to the first
// of the two chunks that they will fill, where other warps turn them into bf16
// (decode_turn_sm90.cuh).
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "winnow/sparse_mla/decode/decode_pieces_sm90.cuh"

namespace winnow::sparse_mla::decode_sm90_detail {

// Shared memory: behind what attention_sm90.cuh has, the table of pieces, and what only rows in f8
// need.
template <int kDim>
struct DecodeLayout {
  Layout<kDim, false> attention;
  Piece pieces[kMostPieces];
  std::uint32_t scales[2][kTileRows][4];  // [slots], of a row: four f32, or seven ue8m0
  Barrier landed[2][kGroups];             // [slots]: copies -> the warps that turn them
};
template <int kDim>
struct DecodePlan : Shared<DecodeLayout<kDim>> {
  using Memory = DecodeLayout<kDim>;
  WINNOW_PLACE(attention)
  WINNOW_PLACE(pieces)
  WINNOW_PLACE(scales)
  WINNOW_PLACE(landed)
  __device__ __forceinline__ Plan<kDim> consumers() const { return {attention().address}; }

  static_assert(offsetof(Memory, scales) % 16 == 0 && sizeof(Memory) <= 232448);
};

// The same memory (threads are below 128), but by no uniform address: with that, ptxas 13.0 makes
// copies with registers that nobody wrote, [R19+UR0+0x2c000] and desc[UR1], which are illegal
// instructions.
template <class Plan>
__device__ __forceinline__ Plan for_thread(Plan shared, int thread) {
  return {shared.base | thread >> 7};
}

// The threads that copy: a warpgroup, or of the two that bring rows in f8 two warps, while the
// other six turn.
template <CacheFormat kFormat>
inline constexpr int kCopyThreads = kFormat == CacheFormat::bf16 ? kGatherThreads : 64;

// Copies the heads of a piece to sQ, and asks L2 for those of the block's next one.
template <int kDim, int kThreads>
__device__ __forceinline__ void load_piece_queries(const KernelParams& params, const Pieces& pieces,
                                                   Plan<kDim> shared, int n, int thread) {
  const Piece at = pieces[n];
#pragma unroll
  for (int part = thread; part < kGatherThreads; part += kThreads) {
    const GatherRows heads = head_rows(params.q.at(at.i, at.s, 0), params.q.stride_h, at.first_head,
                                       part, [&](int, int head) { return head < params.h_q; });
    load_queries(for_thread(shared, part), heads, part, policy_evict_first());
  }
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
template <int kDim, int kThreads>
__device__ __forceinline__ void replace_queries(const KernelParams& params, const Pieces& pieces,
                                                Plan<kDim> shared, int n, std::uint32_t q_uses,
                                                int thread) {
  shared.q_free().wait((q_uses & 1) ^ 1, "rows", 0);
  load_piece_queries<kDim, kThreads>(params, pieces, shared, n, thread);
}

// The rows of a tile.
__device__ __forceinline__ GatherRows chosen_rows(const ChosenView& chosen,
                                                  const TileEntries& entries, std::uint64_t mask,
                                                  int thread) {
  return gather_rows(entries, mask, thread, [&](std::int32_t entry) {
    const auto place = chosen.of_block.divide(entry);
    return reinterpret_cast<const char*>(chosen.cache.row(place.quotient, place.remainder));
  });
}

// --- what only rows in f8 need ------------------------------------------------------------------

// Eight lanes copy 128 bytes of a row, so the warps that copy have so many rows at once.
inline constexpr int kRawCopyThreads = kCopyThreads<CacheFormat::fp8_656>;
inline constexpr int kRawCopyRows = kRawCopyThreads / 8;
inline constexpr int kRawPasses = kTileRows / kRawCopyRows;

template <CacheFormat kFormat>
using RowOf =
    std::conditional_t<kFormat == CacheFormat::fp8_656, Row656,
                       std::conditional_t<kFormat == CacheFormat::fp8_584, Row584, Row576>>;
// Whether a row has scales of its own. In fp8_576 it has none, and RoPE is in f8 too.
template <CacheFormat kFormat>
inline constexpr bool kHasScales = kFormat != CacheFormat::fp8_576;

// One thread, as init_barriers().
template <int kDim>
__device__ __forceinline__ void init_landed_barriers(DecodePlan<kDim> shared) {
  for (int slot = 0; slot < 2; ++slot) {
    for (int group = 0; group < kGroups; ++group) {
      shared.landed()[slot][group].init(kRawCopyThreads + 1);
    }
  }
}

// The first chunk of a group (group_chunk()).
__host__ __device__ constexpr int first_chunk(int slot, int group) {
  return group_chunk(slot, group, 0);
}
// Whether RoPE comes with the group: it is chunk 8 of 576 columns, 7 of 512.
template <int kDim>
__host__ __device__ constexpr bool holds_rope(int slot, int group) {
  return kDim == 576 ? group == kGroups - 1 : first_chunk(slot, group) == 6;
}

// The rows of a tile, as their bytes are.
template <CacheFormat kFormat>
class RawRows {
 public:
  // A thread finds the row of its own number, and asks others for those that it copies.
  __device__ __forceinline__ RawRows(const ChosenView& chosen, const TileEntries& entries,
                                     std::uint64_t mask, int thread) {
    const int lane = thread & 31;
    const auto row_of = [&](std::int32_t entry, int row) {
      const auto place = chosen.of_block.divide(mask >> row & 1 ? entry : 0);
      return chosen.cache.row(place.quotient, place.remainder);
    };
    const std::uint8_t* const low = row_of(entries.low, lane);
    const std::uint8_t* const high = row_of(entries.high, lane + 32);
    valid_ = 0;
#pragma unroll
    for (int pass = 0; pass < kRawPasses; ++pass) {
      const int row = kRawCopyRows * pass + thread / 8;
      const auto from = reinterpret_cast<std::uint64_t>(pass < kRawPasses / 2 ? low : high);
      source_[pass] =
          reinterpret_cast<const std::uint8_t*>(__shfl_sync(kFullWarp, from, row & 31)) +
          (thread & 7) * 16;
      valid_ |= static_cast<std::uint32_t>(mask >> row & 1) << pass;
    }
    scales_valid_ = mask >> thread & 1;
    if constexpr (!kHasScales<kFormat>) {
      scales_ = nullptr;
    } else if constexpr (kFormat == CacheFormat::fp8_656) {
      scales_ = (thread < 32 ? low : high) + Row656::kScaleOffset;
    } else {
      const std::int32_t entry = thread < 32 ? entries.low : entries.high;
      const auto place = chosen.of_block.divide(scales_valid_ ? entry : 0);
      scales_ = chosen.cache.scales_584(place.quotient, place.remainder);
    }
  }

  // Starts the copies of 128 bytes of the rows, or 16 * kUnits, from `offset` on, to `destination`,
  // a chunk.
  template <int kUnits = 8>
  __device__ __forceinline__ void copy(std::uint32_t destination, int offset, int thread,
                                       std::uint64_t policy) const {
    if (kUnits < 8 && (thread & 7) >= kUnits) return;
    const std::uint32_t to = destination + chunk_offset(thread / 8, thread & 7);
#pragma unroll
    for (int pass = 0; pass < kRawPasses; ++pass) {
      cp_async_zfill(to + pass * kRawCopyRows * 128, source_[pass] + offset, valid_ >> pass & 1,
                     policy);
    }
  }
  // The same of the scales to those of a slot.
  __device__ __forceinline__ void copy_scales(std::uint32_t to, int thread,
                                              std::uint64_t policy) const {
    if constexpr (!kHasScales<kFormat>) {
      return;
    } else if constexpr (kFormat == CacheFormat::fp8_656) {
      cp_async_zfill<128>(to + 16 * thread, scales_, scales_valid_, policy);
    } else {
      for (int i = 0; i < 2; ++i) {
        cp_async_word_zfill(to + 16 * thread + 4 * i, scales_ + 4 * i, scales_valid_);
      }
    }
  }

 private:
  static_assert(kRawCopyThreads == kTileRows);
  const std::uint8_t *source_[kRawPasses], *scales_;
  std::uint32_t valid_;
  bool scales_valid_;
};

// Starts the copies of a tile on its way to slot kSlot.
template <CacheFormat kFormat, int kDim, int kSlot>
__device__ __forceinline__ void load_quantised_rows(DecodePlan<kDim> shared, std::uint32_t parity,
                                                    const RawRows<kFormat>& rows,
                                                    std::uint64_t mask, int thread,
                                                    std::uint64_t policy) {
  const DecodePlan<kDim> mine = for_thread(shared, thread);
  const auto slot = mine.consumers().k()[kSlot];
  const auto landed = shared.landed()[kSlot];
  const auto copy = [&](int group) {
    // The arrivals of copies do not say that the group was released. That of the mask does, and
    // this one.
    if (group > 0 && thread == 0) landed[group].arrive();
    // In fp8_584 the bytes of chunks 6 and 7 are 64 values and half of RoPE, which nobody reads
    // there: chunk 7 gets all of it.
    const int chunk = first_chunk(kSlot, group);
    rows.copy(slot[chunk].address, chunk * kChunkColumns, thread, policy);
    if (holds_rope<kDim>(kSlot, group)) {
      rows.template copy<kHasScales<kFormat> ? 8 : 4>(slot[kDim / kChunkColumns - 1].address,
                                                      RowOf<kFormat>::kRopeOffset, thread, policy);
    }
    if (group == 0) rows.copy_scales(mine.scales()[kSlot].address, thread, policy);
  };
  load_groups<kSlot>(shared.consumers(), parity, landed, mask, thread, copy);
}

// --- the role -----------------------------------------------------------------------------------

// Copies run ahead of the consumers by what the slots allow, into the next piece too.

// Of calls with block tables and a cache in bf16 each of whose blocks holds whole tiles. A tile is
// one place in the cache then. What the warps do for a tile before its copies is part of the way
// round of a slot: finding four rows for each thread takes 1,700 cycles, this takes 200.
template <int kDim, class Params>
__device__ __forceinline__ void copy_blocks_role(const Params& params, const Pieces& pieces,
                                                 DecodePlan<kDim> shared) {
  const int thread = threadIdx.x - 2 * 128;
  const std::uint64_t keep = policy_evict_last();
  const ChosenView& all = params.chosen[0];
  const std::int64_t stride = all.cache.row_stride;
  const std::uint8_t* const mine = all.cache.data + thread / 8 * stride + (thread & 7) * 16;
  std::uint32_t uses = 0;  // bit `slot`: the parity of the slot's barriers
  std::uint32_t q_uses = 0;
  for (int piece = 0; piece < pieces.count(); ++piece) {
    const int tiles = pieces.tiles(piece, 0);
    if (tiles == 0) continue;
    const int first = pieces.first(piece, 0) * kTileRows;
    int left = pieces.entries(piece, 0) - first;
    const auto place = all.of_block.divide(first);
    const std::int32_t* table =
        all.indices + pieces[piece].i * all.indices_stride_b + place.quotient;
    std::uint32_t row = place.remainder;
    std::int32_t next = __ldg(table);  // the block of the next tile
    const int first_slot = pieces.template first_slot<Params>(piece);
    for (int tile = 0; tile < tiles; ++tile) {
      const int slot = (tile ^ first_slot) & 1;
      const auto block = static_cast<std::uint32_t>(next);
      const bool there = block < params.blocks;  // negative ones are not, either
      const std::uint64_t mask = !there              ? 0
                                 : left >= kTileRows ? ~std::uint64_t{0}
                                                     : (std::uint64_t{1} << left) - 1;
      const std::uint8_t* from = mine;
      if (there) from += block * all.cache.block_stride + row * stride;
      GatherRows rows;
      rows.valid = 0;
#pragma unroll
      for (int pass = 0; pass < kGatherPasses; ++pass) {
        rows.source[pass] = reinterpret_cast<const char*>(from + pass * 16 * stride);
        rows.valid |= static_cast<std::uint32_t>(mask >> (16 * pass + thread / 8) & 1) << pass;
      }
      left -= kTileRows;
      row += kTileRows;
      if (row == all.cache.block_size) row = 0, ++table;
      if (tile + 1 < tiles) next = __ldg(table);
      const std::uint32_t parity = uses >> slot & 1;
      if (slot == 0) {
        load_tile_rows<0>(shared.consumers(), parity, rows, mask, thread, keep);
      } else {
        load_tile_rows<1>(shared.consumers(), parity, rows, mask, thread, keep);
      }
      if (tile == 0) {
        replace_queries<kDim, kGatherThreads>(params, pieces, shared.consumers(), piece, q_uses++,
                                              thread);
      }
      uses ^= 1u << slot;
    }
  }
}

// Of all other calls.
template <CacheFormat kFormat, int kDim, class Params>
__device__ __forceinline__ void copy_rows_role(const Params& params, const Pieces& pieces,
                                               DecodePlan<kDim> shared) {
  const int thread = threadIdx.x - 2 * 128;
  const int lane = thread & 31;
  const std::uint64_t keep = policy_evict_last();
  TileStream<Params> stream(params, pieces);
  std::uint32_t uses = 0;  // bit `slot`: the parity of the slot's barriers
  std::uint32_t q_uses = 0;
  TileEntries entries;  // of the stream's tile
  const auto advance = [&] {
    if (!stream.advance()) return false;
    entries = stream.load(lane);
    return true;
  };
  for (bool more = advance(); more;) {
    const ChosenView& chosen = params.chosen[stream.cache()];
    const std::uint64_t mask = tile_mask(entries, chosen.cache.slots);
    const int slot = stream.slot();
    const bool begins = stream.begins_piece();
    const int piece = stream.piece();
    const auto load = [&]<int kSlot>() {
      const std::uint32_t parity = uses >> kSlot & 1;
      if constexpr (kFormat == CacheFormat::bf16) {
        const GatherRows rows = chosen_rows(chosen, entries, mask, thread);
        more = advance();
        load_tile_rows<kSlot>(shared.consumers(), parity, rows, mask, thread, keep);
      } else {
        const RawRows<kFormat> rows(chosen, entries, mask, thread);
        more = advance();
        load_quantised_rows<kFormat, kDim, kSlot>(shared, parity, rows, mask, thread, keep);
      }
    };
    if (slot == 0) {
      load.template operator()<0>();
    } else {
      load.template operator()<1>();
    }
    if (begins) {
      replace_queries<kDim, kCopyThreads<kFormat>>(params, pieces, shared.consumers(), piece,
                                                   q_uses++, thread);
    }
    uses ^= 1u << slot;
  }
}

template <CacheFormat kFormat, int kDim, class Params>
__device__ __forceinline__ void copy_role(const Params& params, const Pieces& pieces,
                                          DecodePlan<kDim> shared) {
  if constexpr (Params::kPaged && kFormat == CacheFormat::bf16) {
    if (params.chosen[0].cache.block_size % kTileRows == 0) {
      return copy_blocks_role(params, pieces, shared);
    }
  }
  copy_rows_role<kFormat>(params, pieces, shared);
}

}  // namespace winnow::sparse_mla::decode_sm90_detail
