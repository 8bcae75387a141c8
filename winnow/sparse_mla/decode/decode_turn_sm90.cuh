// Decode, sm90: the warps that turn rows in f8 into bf16.
//
// They find them in the place where wgmma reads bf16, as other warps copied them. That takes less
// time than the products do (decode_values.cuh).
#pragma once

#include <cstdint>

#include "winnow/sparse_mla/decode/decode_rows_sm90.cuh"
#include "winnow/sparse_mla/decode/decode_values.cuh"

namespace winnow::sparse_mla::decode_sm90_detail {

using namespace winnow::sparse_mla::decode_values;

// What two warpgroups have beside the warps that copy. A warp turns a quarter of a group at
// once; with fewer rows its fixed latencies would count more.
inline constexpr int kTurnWarps = (256 - kCopyThreads<CacheFormat::fp8_656>) / 32;
inline constexpr int kQuarters = 4;
inline constexpr int kTurnedGroupArrivals = kQuarters * kWarpArrival;
// RoPE in f8 comes with the last group, and is turned like a further one.
template <CacheFormat kFormat>
inline constexpr bool kTurnsRope = kFormat == CacheFormat::fp8_576;
inline constexpr std::uint32_t kRopeChunk = 8;
template <CacheFormat kFormat>
__device__ constexpr int turned_group_arrivals(int group) {
  return kTurnedGroupArrivals * (kTurnsRope<kFormat> && group == kGroups - 1 ? 2 : 1);
}

// Turns a quarter of a group of a tile: 16 rows. A thread has two of them, eight apart,
// and of each chunk 16 columns of them: four lanes have those of a row.
template <CacheFormat kFormat>
class RowTurner {
 public:
  __device__ __forceinline__ RowTurner() {
    const int lane = threadIdx.x & 31;
    // Rows 5 apart for the two that eight consecutive lanes have: neither their raw bytes nor their
    // results share banks.
    row_ = (lane & 4 ? 5 : 0) ^ (lane & 8 ? 2 : 0) ^ (lane & 16 ? 1 : 0);
    raw_ = chunk_offset(row_, lane & 3);
    for (int i = 0; i < 2; ++i) turned_[i] = chunk_offset(row_, 2 * (lane & 3) + i);
  }

  // Quarter `quarter` of the group that begins with chunk `chunk` of a tile, whose first chunk lies
  // at `to` and whose rows' scales at `scales`; of the group chunks first to end - 1.
  __device__ __forceinline__ void turn(std::uint32_t to, std::uint32_t scales_of_rows,
                                       std::uint32_t chunk, std::uint32_t quarter, int first = 0,
                                       int end = 2) const {
    // Of fp8_584, chunk 7 is RoPE; of fp8_576, no chunk follows RoPE.
    if (kFormat == CacheFormat::fp8_584 && chunk == 6) end = 1;
    if (kTurnsRope<kFormat> && chunk == kRopeChunk) end = 1;
    const auto has = [&](int c) { return c >= first && c < end; };
    const std::uint32_t base = to + quarter * 16 * 128;
    const auto raw_place = [&](int r, int c) { return base + r * kRowsApart + (raw_ ^ 64 * c); };
    const auto raw = [&](int r, int c) { return ld_shared_words(raw_place(r, c)); };
    const auto scales_of = [&](int r) {
      if constexpr (kHasScales<kFormat>) {
        return ld_shared<std::uint32_t>(scales_of_rows + (16 * quarter + row_ + 8 * r) * 16 +
                                        (kFormat == CacheFormat::fp8_656 ? chunk / 2 : chunk / 4) *
                                            4);
      } else {
        return __float_as_uint(1.0f);
      }
    };
    const auto scale_of = [&](std::uint32_t scales, int c) {
      return kFormat != CacheFormat::fp8_584
                 ? __uint_as_float(scales)
                 : ue8m0_to_f32(static_cast<std::uint8_t>(scales >> 8 * (chunk % 4 + c)));
    };
    const auto store = [&](int r, int c, const uint4& of, const auto& convert) {
      const uint2 x = convert(of.x), y = convert(of.y), z = convert(of.z), w = convert(of.w);
      const std::uint32_t to = base + c * kChunkBytes + r * kRowsApart;
      st_shared(to + turned_[0], make_uint4(x.x, x.y, y.x, y.y));
      st_shared(to + turned_[1], make_uint4(z.x, z.y, w.x, w.y));
    };
    uint4 words[kRows][2];
    std::uint32_t scales[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      scales[r] = scales_of(r);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        words[r][c] = make_uint4(0, 0, 0, 0);
        if (has(c)) words[r][c] = raw(r, c);
      }
    }
    __syncwarp();  // all lanes have read what the results replace
    // Whether these are the results is known when they are stored, not before.
    std::uint32_t nan[kRows][2];
    bool plain = true;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        nan[r][c] = find_nan(words[r][c]);
        if (!has(c)) continue;
        const float scale = scale_of(scales[r], c);
        plain = plain && is_short(scale);
        const std::uint32_t factor = factor_of(scale);
        store(r, c, words[r][c], [&](std::uint32_t word) { return dequantise(word, factor); });
      }
    }
    const std::uint32_t any = nan[0][0] | nan[0][1] | (nan[1][0] | nan[1][1]);
    if (!__all_sync(kFullWarp, plain && (any & kNanBits) == 0)) {
      // It is rare and must not cost registers: the words go back to where they were, and are read
      // one by one, those of the second chunk first, whose results replace none.
      __syncwarp();
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int c = 0; c < 2; ++c) st_shared(raw_place(r, c), words[r][c]);
      }
#pragma unroll 1
      for (int n = 0; n < 2 * kRows; ++n) {
        const int r = n % 2, c = n < 2;
        if (!has(c)) continue;
        const uint4 of = raw(r, c);
        const float scale = scale_of(scales_of(r), c);
        __syncwarp();
        store(r, c, of, [&](std::uint32_t word) { return dequantise_any(word, scale); });
      }
    }
  }

 private:
  static constexpr int kRows = 2;
  static constexpr std::uint32_t kRowsApart = 8 * 128;

  int row_;
  // In a chunk: where the thread's bytes of the first chunk lie, and where halves of its columns
  // go.
  std::uint32_t raw_, turned_[2];
};

// Turns the quarters of the groups of the block's tiles, in order: the warps have them in turn.
template <CacheFormat kFormat, int kDim, class Params>
__device__ __forceinline__ void turn_role(const Pieces& pieces, DecodePlan<kDim> shared, int warp) {
  const RowTurner<kFormat> turner;
  constexpr std::uint32_t kUnits = (kGroups + (kTurnsRope<kFormat> ? 1 : 0)) * kQuarters;
  std::uint32_t unit = warp;  // the warp's next one, from those of the tile on
  std::uint32_t uses = 0;     // bit `slot`: the parity of the slot's barriers
  for (int n = 0; n < pieces.count(); ++n) {
    const int tiles = pieces.tiles(n), first_slot = pieces.template first_slot<Params>(n);
    for (int tile = 0; tile < tiles; ++tile) {
      const int slot = (tile ^ first_slot) & 1;
#pragma unroll 1
      for (; unit < kUnits; unit += kTurnWarps) {
        std::uint32_t group = unit / kQuarters;
        const std::uint32_t quarter = unit % kQuarters;
        std::uint32_t chunk = 4 * (slot ^ group / 2) + 2 * (group % 2);  // first_chunk()
        if (kTurnsRope<kFormat> && group == kGroups) {
          group = kGroups - 1;
          chunk = kRopeChunk;
        }
        shared.landed()[slot][group].wait(uses >> slot & 1, "turn",
                                          static_cast<int>(slot * kGroups + group));
        turner.turn(shared.consumers().k()[slot][chunk].address, shared.scales()[slot].address,
                    chunk, quarter);
        // The consumers have the fence that lets wgmma read.
        shared.consumers().full()[slot][group].arrive_warp();
      }
      unit -= kUnits;
      uses ^= 1u << slot;
    }
  }
}

}  // namespace winnow::sparse_mla::decode_sm90_detail
