// Decode, sm90: the warpgroup that brings the rows.
//
// Rows in bf16 it copies by cp.async. Those in f8 it copies in the same way and turns into bf16 in
// the place where wgmma reads them. That takes less time than the products do, since a pair of
// values costs four instructions: the bits of f8_e4m3, moved into those of bf16, are the value
// times 2^-120, subnormal numbers included, and one multiplication by scale * 2^120 rounds the
// result as the format says. Groups with scales that bf16 cannot hold, and those that hold a NaN,
// go a longer way to the same values.
//
// Nothing waits for memory in a register: what a warp has loaded ahead stops it at its next
// instruction that shares a scoreboard with the load, whatever that is.
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
inline constexpr int kRowsWarps = kGatherThreads / 32;

template <CacheFormat kFormat>
using RowOf = std::conditional_t<kFormat == CacheFormat::fp8_656, Row656, Row584>;

// What the warps that bring rows keep in shared memory, each for itself: the entries of the two
// tiles to come, the scales of the tiles in the slots, and barriers on which copies land.
struct RowsMemory {
  std::int32_t entries[2][kRowsWarps][kThreadRows][8];
  std::uint32_t scales[2][kTileRows][4];  // of a row: four f32, or seven ue8m0
  Mbarrier landed[2][kGroups][kRowsWarps];
};
template <int kDim>
struct RowsPlan {
  static constexpr int kBase = Plan<kDim>::kBytes + kMostPieces * int{sizeof(Piece)};
  static constexpr int kEntries = kBase + offsetof(RowsMemory, entries);
  static constexpr int kScales = kBase + offsetof(RowsMemory, scales);
  static constexpr int kLanded = kBase + offsetof(RowsMemory, landed);
  static constexpr int kBytes = kBase + int{sizeof(RowsMemory)};
  static_assert(kBase % 16 == 0 && kBytes <= 232448);
};

// One thread, as init_barriers().
template <int kDim>
__device__ __forceinline__ void init_rows_barriers(std::uint32_t smem) {
  for (int i = 0; i < 2 * kGroups * kRowsWarps; ++i) {
    mbarrier_init(smem + RowsPlan<kDim>::kLanded + 8 * i, 32);
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
// In fp8_584 chunk 7 is RoPE, and no second one of its group.
template <CacheFormat kFormat>
__device__ __forceinline__ bool has_second(int chunk) {
  return kFormat == CacheFormat::fp8_656 || chunk != 6;
}
// The arrivals of a group: one a warp.
inline constexpr int kQuantisedGroupArrivals = kRowsWarps * kWarpArrival;

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

// A tile on its way: where its copies go, and what comes after it.
struct TileInFlight {
  int slot, piece;
  bool begins_piece;
};

// Brings the tiles of the block's pieces, in groups. A group is copied, as the cache holds it, into
// the very chunks that it will fill, as soon as these are released: each thread copies 16 values
// to where the first of its results will stand, so that nothing but its own copy stands between
// them. When they have landed, it turns them into bf16. Groups are copied and turned in order, and
// copies go before: a warp turns a group only while there is none that it could copy.
template <CacheFormat kFormat, int kDim>
class RowsRole {
  using P = Plan<kDim>;
  using R = RowsPlan<kDim>;

 public:
  __device__ __forceinline__ RowsRole(const KernelParams& params, const Pieces& pieces,
                                      std::uint32_t smem)
      : params_(params),
        pieces_(pieces),
        smem_(smem),
        thread_(static_cast<int>(threadIdx.x) - 2 * 128),
        stream_(params, pieces),
        ahead_(params, pieces) {}

  __device__ __forceinline__ void run() {
    bool more = stream_.advance();
    if (!more) return;
    more_ahead_ = ahead_.advance();
    load_first_entries();
    // sQ is free before the first piece.
    load_piece_queries<kDim>(params_, pieces_, smem_, stream_.piece(), thread_);
    __syncwarp();

    int group = 0;    // that is copied next, of the stream's tile
    int turned = 0;   // group that is turned next, of first_
    int waiting = 0;  // groups that are copied and not turned
    while (more || waiting > 0) {
      if (more) {
        const std::uint32_t empty = smem_ + P::kEmpty + 8 * (stream_.slot() * kGroups + group);
        const std::uint32_t parity = (copies_ >> stream_.slot() & 1) ^ 1;
        bool released = __all_sync(kFullWarp, mbarrier_test_wait(empty, parity));
        if (!released && waiting == 0) {
          mbarrier_wait(empty, parity, "rows", 10 * stream_.slot() + group);
          released = true;
        }
        if (released) {
          copy_group(group, waiting);
          ++waiting;
          if (++group == kGroups) {
            group = 0;
            copies_ ^= 1u << stream_.slot();
            more = stream_.advance();
          }
          continue;
        }
      }
      turn_group(turned);
      --waiting;
      if (++turned == kGroups) {
        turned = 0;
        turns_ ^= 1u << first_.slot;
        if (first_.begins_piece) {
          if (q_uses_ > 0) {
            replace_queries<kDim>(params_, pieces_, smem_, first_.piece, q_uses_, thread_);
          }
          ++q_uses_;
        }
        first_ = second_;
      }
    }
  }

 private:
  __device__ std::uint32_t landed(int slot, int group) const {
    return smem_ + R::kLanded + 8 * ((slot * kGroups + group) * kRowsWarps + thread_ / 32);
  }
  __device__ std::uint32_t entries_at(int tile) const {
    return smem_ + R::kEntries + 64 * ((tile & 1) * kRowsWarps + thread_ / 32);
  }
  // Of the thread's row r.
  __device__ std::uint32_t scales_at(int slot, int r) const {
    return smem_ + R::kScales + 16 * (slot * kTileRows + 32 * r + thread_ / 4);
  }
  // Where the thread's columns of a chunk stand. 32 rows further the swizzle is the same.
  __device__ std::uint32_t columns_at(int slot, int chunk, int r) const {
    return smem_ + P::kK + slot * P::kSlotBytes + chunk * kChunkBytes +
           chunk_offset(thread_ / 4, 2 * (thread_ & 3)) + r * 32 * 128;
  }

  // Begins to copy the warp's entries of the tile that `ahead_` has come to, lane k the one of row
  // k / 8 * 32 + k % 8 of the warp's.
  __device__ __forceinline__ void copy_entries(int tile) {
    const int lane = thread_ & 31, row = 32 * (lane / 8) + 8 * (thread_ / 32) + lane % 8;
    if (lane >= 16) return;
    const bool counts = row < ahead_.entries();
    cp_async_word_zfill(entries_at(tile) + 4 * lane, ahead_.list() + (counts ? row : 0), counts);
  }
  // Those of the first two tiles, at once.
  __device__ __forceinline__ void load_first_entries() {
    const int lane = thread_ & 31, row = 32 * (lane / 8) + 8 * (thread_ / 32) + lane % 8;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      if (!more_ahead_) break;
      if (lane < 16 && row < ahead_.entries()) {
        st_shared(entries_at(tile) + 4 * lane, __ldg(ahead_.list() + row));
      }
      more_ahead_ = ahead_.advance();
    }
  }

  // Takes up the stream's tile: its rows, its mask and its scales.
  __device__ __forceinline__ void begin_tile(int waiting) {
    const ChosenView& chosen = params_.chosen[stream_.cache()];
    const CacheView<const std::uint8_t>& cache = chosen.cache;
    const TileInFlight tile{stream_.slot(), stream_.piece(), stream_.begins_piece()};
    if (waiting == 0) {
      first_ = tile;
    } else {
      second_ = tile;
    }
    valid_ = 0;
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
      const int row = 32 * r + thread_ / 4;
      // Unsigned, so that a negative entry is none either.
      const auto entry =
          ld_shared<std::uint32_t>(entries_at(tile_) + 32 * r + 4 * (thread_ % 32 / 4));
      const bool valid = row < stream_.entries() && entry < cache.slots;
      const auto place = chosen.of_block.divide(valid ? entry : 0);
      row_[r] = cache.row(place.quotient, place.remainder);
      valid_ |= static_cast<std::uint32_t>(valid) << r;
      constexpr int kWords = kFormat == CacheFormat::fp8_656 ? 4 : 2;
      const std::uint8_t* scales = row_[r] + Row656::kScaleOffset;
      if constexpr (kFormat == CacheFormat::fp8_584) {
        scales = cache.scales_584(place.quotient, place.remainder);
      }
      const int word = thread_ & 3;
      if (word < kWords) {
        cp_async_word_zfill(scales_at(tile.slot, r) + 4 * word, scales + 4 * word, valid);
      }
    }
    // The owner's warps read the last mask before they released the group just waited for.
    store_mask(smem_ + P::kMask + 8 * tile.slot);
    __syncwarp();  // all lanes have read the entries
    if (more_ahead_) {
      copy_entries(tile_);
      more_ahead_ = ahead_.advance();
    }
    ++tile_;
  }

  // Writes which of the warp's rows are valid to the tile's mask.
  __device__ __forceinline__ void store_mask(std::uint32_t mask_at) const {
    // Lane k learns of the rows of lanes 4 k to 4 k + 3.
    const std::uint32_t valid = __shfl_sync(kFullWarp, valid_, 4 * (thread_ & 7));
    const std::uint32_t low = __ballot_sync(kFullWarp, valid & 1);
    const std::uint32_t high = __ballot_sync(kFullWarp, valid & 2);
    if ((thread_ & 31) != 0) return;
    st_shared(mask_at + thread_ / 32, static_cast<std::uint8_t>(low));
    st_shared(mask_at + 4 + thread_ / 32, static_cast<std::uint8_t>(high));
  }

  // Begins the copies of a group of the stream's tile.
  __device__ __forceinline__ void copy_group(int group, int waiting) {
    if (group == 0) begin_tile(waiting);
    const int slot = stream_.slot(), chunk = first_chunk(slot, group), column = thread_ & 3;
    const std::uint64_t keep = policy_evict_last();
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
      const bool valid = valid_ >> r & 1;
      const std::uint8_t* const from = row_[r] + kChunkColumns * chunk + 16 * column;
      cp_async_zfill(columns_at(slot, chunk, r), from, valid, keep);
      if (has_second<kFormat>(chunk)) {
        cp_async_zfill(columns_at(slot, chunk + 1, r), from + kChunkColumns, valid, keep);
      }
      if (holds_rope<kDim>(slot, group)) {
        constexpr int kChunk = kDim / kChunkColumns - 1;
        const std::uint32_t to = smem_ + P::kK + slot * P::kSlotBytes + kChunk * kChunkBytes;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          cp_async_zfill(to + chunk_offset(32 * r + thread_ / 4, column + 4 * half),
                         row_[r] + RowOf<kFormat>::kRopeOffset + 16 * (column + 4 * half), valid,
                         keep);
        }
      }
    }
    mbarrier_arrive_cp_async(landed(slot, group));
  }

  // Turns a group of first_ into bf16, in its place.
  __device__ __forceinline__ void turn_group(int group) {
    const int slot = first_.slot, chunk = first_chunk(slot, group);
    const bool second = has_second<kFormat>(chunk);
    mbarrier_wait(landed(slot, group), turns_ >> slot & 1, "rows", 20 + 4 * slot + group);
    float scales[kThreadRows][2];
    uint4 words[kThreadRows][2];
    std::uint32_t nan = 0;
    bool plain = true;
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
      const auto both = ld_shared<std::uint32_t>(
          scales_at(slot, r) + (kFormat == CacheFormat::fp8_656 ? chunk / 2 * 4 : chunk / 4 * 4));
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        words[r][c] = make_uint4(0, 0, 0, 0);
        scales[r][c] = 0;
        if (c == 1 && !second) continue;
        words[r][c] = ld_shared_words(columns_at(slot, chunk + c, r));
        scales[r][c] = kFormat == CacheFormat::fp8_656
                           ? __uint_as_float(both)
                           : ue8m0_to_f32(static_cast<std::uint8_t>(both >> 8 * (chunk % 4 + c)));
        const uint4& w = words[r][c];
        nan |= find_nan(w.x) | find_nan(w.y);
        nan |= find_nan(w.z) | find_nan(w.w);
        plain = plain && is_short(scales[r][c]);
      }
    }
    plain = __all_sync(kFullWarp, plain && (nan & 0x80808080u) == 0);
    const auto store = [&](int r, int c, const uint4& of, const auto& convert) {
      if (c == 1 && !second) return;
      const uint2 x = convert(of.x), y = convert(of.y), z = convert(of.z), w = convert(of.w);
      const std::uint32_t to = columns_at(slot, chunk + c, r);
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
          store(r, c, words[r][c], [&](std::uint32_t word) { return dequantise(word, factor); });
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
        store(n / 2, n % 2, pick(words),
              [&](std::uint32_t word) { return dequantise_any(word, scale); });
      }
    }
    // The consumers have the fence that lets wgmma read.
    mbarrier_arrive_warp(smem_ + P::kFull + 8 * (slot * kGroups + group));
  }

  const KernelParams& params_;
  const Pieces& pieces_;
  const std::uint32_t smem_;
  const int thread_;
  TileStream stream_, ahead_;  // of the tile that is copied, and of the one whose entries are next
  bool more_ahead_ = false;
  int tile_ = 0;                          // tiles taken up
  std::uint32_t copies_ = 0, turns_ = 0;  // bit `slot`: the parity of the slot's barriers
  std::uint32_t q_uses_ = 0;
  const std::uint8_t* row_[kThreadRows] = {};  // of the stream's tile
  std::uint32_t valid_ = 0;                    // bits 0 and 1: the rows are valid
  TileInFlight first_{}, second_{};            // of which groups wait: the older tile and the other
};

}  // namespace winnow::sparse_mla::decode_sm90_detail
