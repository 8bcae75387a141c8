// Decode, for GPUs of compute capability 8.0 and newer: the kernels, but for few heads over rows in
// f8 (decode_few_cuda.cuh). A block has a segment of a query's tiles (decode_split_cuda.h), for 64
// heads, or for 32 where there are no more, and the tile loop of attend_cuda.cuh.
//
// Rows in bf16 are copied to the slots that the products read. Rows in f8 are copied as they are, a
// tile ahead, and each warp turns those that it has copied into bf16: pipelined, in the slot of the
// next tile, beside the products of others; otherwise, in the one slot that there is, between the
// values of the tile before and the logits of theirs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "winnow/device/common/registers.cuh"
#include "winnow/sparse_mla/attend_cuda.cuh"
#include "winnow/sparse_mla/decode/decode_values.cuh"
#include "winnow/sparse_mla/decode/decode_view.cuh"
#include "winnow/sparse_mla/lse.cuh"

namespace winnow::sparse_mla::decode_cuda_detail {

using namespace winnow::sparse_mla::attention_cuda;

// What a segment that is no whole query leaves of a head, beside the output before its division by
// the sum: the reference in base 2 and the sum.
struct alignas(8) PartialSums {
  float reference, sum;
};

struct KernelParams {
  ChosenView chosen[2];  // of the cache and of the extra one
  HeadsView q, out;
  HeadsView lse;           // data may be null
  const float* attn_sink;  // may be null
  std::int64_t attn_sink_stride;
  float scale;           // of logits in base 2
  float lse_of_nothing;  // in the place of -inf
  int h_q;
  std::uint32_t s_q, head_blocks, segments, segment_tiles;
  // Paged: the entries of the first list are positions of the sequence, `indices` are the block
  // tables and topk_length is context_lens.
  bool paged;
  std::int32_t step;           // paged: s_q where context_lens counts all queries of the step, or 0
  std::uint32_t blocks;        // paged: of the cache
  std::uint32_t padded_heads;  // of all blocks of heads
  float* partial_out;          // [queries, segments, padded_heads, 512]
  PartialSums* partial_sums;   // [queries, segments, padded_heads]
};

// --- entries ------------------------------------------------------------------------------------

// Entries of list `c` of query s of sequence i that count.
__device__ __forceinline__ int entries_of(const KernelParams& params, int c, std::uint32_t i,
                                          std::uint32_t s) {
  const ChosenView& chosen = params.chosen[c];
  if (chosen.topk_length == nullptr) return chosen.topk;
  const std::int32_t given =
      __ldg(chosen.topk_length + i * chosen.topk_length_stride_b + s * chosen.topk_length_stride_s);
  const int entries = min(max(given, 0), chosen.topk);
  return c == 0 && params.step > 0 ? rows_of_step(entries, params.step, static_cast<int>(s))
                                   : entries;
}

// What bounds the entries of a segment, in shared memory, since registers are scarce. Of each list:
// where entry 0 of tile 0 stands, and where its entries end; the tiles of the first list, and of
// both; the sequence, and the query of it. It is found once, so that whatever is written to the
// lengths meanwhile, all warps go by the same tiles.
using SegmentBounds = std::int32_t[8];

// A tile belongs to one list, and those of the first list come before those of the second.
__device__ __forceinline__ void find_bounds(const KernelParams& params, std::uint32_t i,
                                            std::uint32_t s, std::uint32_t segment,
                                            Place<SegmentBounds> bounds) {
  int from = static_cast<int>(segment * params.segment_tiles);
  int to = from + static_cast<int>(params.segment_tiles);
  int tiles = 0;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const ChosenView& chosen = params.chosen[c];
    const int entries = entries_of(params, c, i, s);
    const int begin = min(max(from, 0), chosen.tiles);
    const int end = min(min(max(to, 0), chosen.tiles), ceil_div(entries, kRows));
    bounds[c].store((begin - tiles) * kRows);
    bounds[2 + c].store(min(entries, end * kRows));
    tiles += max(end - begin, 0);
    bounds[4 + c].store(tiles);
    from -= chosen.tiles;
    to -= chosen.tiles;
  }
  bounds[6].store(static_cast<std::int32_t>(i));
  bounds[7].store(static_cast<std::int32_t>(s));
}

// The tiles of a segment that hold entries.
class SegmentTiles {
 public:
  __device__ __forceinline__ SegmentTiles(const KernelParams& params, Place<SegmentBounds> bounds)
      : params_(params), bounds_(bounds), first_tiles_(bounds[4].load()) {}

  __device__ __forceinline__ int count() const { return bounds_[5].load(); }
  __device__ __forceinline__ const ChosenView& chosen(int tile) const {
    return params_.chosen[list(tile)];
  }
  // Starts to bring what the list has of entry `n` of a tile to its place: its slot, or paged the
  // block that holds it; -1 where there is none.
  __device__ __forceinline__ void bring(int tile, int n, Place<std::int32_t> place) const {
    const int at = first_of(tile) + n;
    if (at >= bounds_[2 + list(tile)].load()) {
      place.store(-1);
      return;
    }
    const ChosenView& rows = chosen(tile);
    const std::int32_t* const list = rows.indices + bounds_[6].load() * rows.indices_stride_b;
    const std::int32_t* const from =
        params_.paged ? list + rows.of_block.divide(static_cast<std::uint32_t>(at)).quotient
                      : list + bounds_[7].load() * rows.indices_stride_s + at;
    cp_async_word_zfill(place.address, from, true);
  }
  // The slot of entry `n` of a tile, which holds() says whether there is.
  __device__ __forceinline__ std::int32_t entry(int tile, int n, std::int32_t brought) const {
    if (!params_.paged) return brought;
    const auto block = static_cast<std::uint32_t>(brought);
    if (block >= params_.blocks) return -1;  // negative ones, too
    const ChosenView& rows = chosen(tile);
    const auto at = static_cast<std::uint32_t>(first_of(tile) + n);
    return static_cast<std::int32_t>(block * rows.cache.block_size +
                                     rows.of_block.divide(at).remainder);
  }
  __device__ __forceinline__ bool holds(int tile, std::int32_t slot) const {
    return chosen(tile).cache.holds(slot);
  }

 private:
  __device__ __forceinline__ int list(int tile) const { return tile >= first_tiles_; }
  __device__ __forceinline__ int first_of(int tile) const {
    return tile * kRows + bounds_[list(tile)].load();
  }

  const KernelParams& params_;
  Place<SegmentBounds> bounds_;
  int first_tiles_;
};

// --- rows in f8 ---------------------------------------------------------------------------------

// Rows of a tile as their bytes are, in shared memory.
template <CacheFormat kFormat>
struct RawRows {
  static constexpr int kBytes = 0;
};
template <>
struct RawRows<CacheFormat::fp8_656> : Row656 {
  static constexpr int kCopied = Row656::kBytes, kPitch = kCopied;  // the scales are inside
  static constexpr int kBytes = kRows * kPitch;
};
template <>
struct RawRows<CacheFormat::fp8_584> : Row584 {
  static constexpr int kCopied = kRowBytes, kPitch = kRowBytes;
  static constexpr int kScales = kRows * kPitch;  // of each row, behind all rows
  static constexpr int kBytes = kScales + kRows * Row584::kScaleBytes;
};

// Copies a row as RowCopy does, a line of 128 bytes of memory at each call: a row begins at any
// multiple of 16 bytes, and lanes that read two lines take twice the time.
template <CacheFormat kFormat>
class RawRowCopy {
  using Rows = RawRows<kFormat>;
  static constexpr int kLineUnits = 8, kUnits = Rows::kCopied / kUnitBytes;
  static_assert(Rows::kCopied % kUnitBytes == 0);

 public:
  static constexpr int kChunks = (kUnits + 2 * (kLineUnits - 1)) / kLineUnits;

  // Row `to` of the rows at `raw`; `row` is where it begins in memory, and `scales` where its
  // scales do if they are apart: these are copied at once.
  __device__ __forceinline__ RawRowCopy(std::uint32_t raw, int to, const char* row,
                                        const char* scales, bool visible, int lane)
      : unit_(lane % kLineUnits -
              static_cast<int>(reinterpret_cast<std::uint64_t>(row) / kUnitBytes % kLineUnits)),
        from_(forget(row + unit_ * kUnitBytes)),
        to_(in_one_register(raw + to * Rows::kPitch + unit_ * kUnitBytes, lane)),
        visible_(visible) {
    if constexpr (kFormat == CacheFormat::fp8_584) {
      const int word = lane % kLineUnits;
      if (word < 2) {
        cp_async_word_zfill(raw + Rows::kScales + to * Rows::kScaleBytes + 4 * word,
                            scales + 4 * word, visible);
      }
    }
  }

  __device__ __forceinline__ void operator()(int chunk) const {
    if (chunk >= kChunks) return;
    const int first = chunk * kLineUnits;  // of the row's units, if it begins with a line
    const bool whole = first >= kLineUnits - 1 && first + kLineUnits <= kUnits;
    if (whole || (unit_ + first >= 0 && unit_ + first < kUnits)) {
      cp_async_zfill(to_ + first * kUnitBytes, from_ + first * kUnitBytes, visible_);
    }
  }

 private:
  int unit_;
  const char* from_;
  std::uint32_t to_;
  bool visible_;
};

// Turns the rows that the warp has copied into bf16, in the slot. All its copies are there.
template <CacheFormat kFormat, int kDim>
__device__ __forceinline__ void turn_rows(std::uint32_t raw, Place<Tile<kRows, kDim>> slot,
                                          int warp, int lane) {
  using namespace decode_values;
  using Rows = RawRows<kFormat>;
  const int row = 4 * warp + lane / 8, unit = lane % 8;
  const std::uint32_t from = raw + row * Rows::kPitch;
  const auto store = [&](int column8, const uint4& of, const auto& convert) {
    const uint2 x = convert(of.x), y = convert(of.y), z = convert(of.z), w = convert(of.w);
    st_shared(slot.unit(row, column8), make_uint4(x.x, x.y, y.x, y.y));
    st_shared(slot.unit(row, column8 + 1), make_uint4(z.x, z.y, w.x, w.y));
  };
#pragma unroll
  for (int at = 0; at < Rows::kQuantised; at += 128) {  // 16 values a lane, of one scale
    const int first = at + 16 * unit;
    const bool quantised = Rows::kQuantised % 128 == 0 || first < Rows::kQuantised;
    float scale = 0;
    uint4 words = make_uint4(0, 0, 0, 0);
    if (quantised) {
      words = ld_shared_words(from + first);
      if constexpr (kFormat == CacheFormat::fp8_656) {
        scale = ld_shared<float>(from + Rows::kScaleOffset + first / Rows::kGroup * 4);
      } else {
        const int group = first / Rows::kGroup;
        const std::uint32_t four = raw + Rows::kScales + row * Rows::kScaleBytes + group / 4 * 4;
        const auto scales = ld_shared<std::uint32_t>(four);
        scale = ue8m0_to_f32(static_cast<std::uint8_t>(scales >> 8 * (group % 4)));
      }
    }
    const bool plain = is_short(scale) && (find_nan(words) & kNanBits) == 0;
    if (!quantised) continue;
    if (plain) {
      const std::uint32_t factor = factor_of(scale);
      store(first / 8, words, [&](std::uint32_t word) { return dequantise(word, factor); });
    } else {
      store(first / 8, words, [&](std::uint32_t word) { return dequantise_any(word, scale); });
    }
  }
  st_shared(slot.unit(row, Rows::kQuantised / 8 + unit),
            ld_shared_words(from + Rows::kRopeOffset + unit * kUnitBytes));
}

// --- what a block leaves ------------------------------------------------------------------------

__device__ __forceinline__ float sink_of(const KernelParams& params, int head) {
  if (params.attn_sink == nullptr) return negative_infinity();
  return __ldg(params.attn_sink + head * params.attn_sink_stride) * kLog2e;
}

__device__ __forceinline__ void store_lse(const KernelParams& params, std::uint32_t i,
                                          std::uint32_t s, int head, float reference, float sum) {
  if (!params.lse.present()) return;
  *reinterpret_cast<float*>(params.lse.at(i, s, head)) =
      lse_of(reference, sum, params.lse_of_nothing);
}

// Writes the output of the first `count` heads as it is to `rows`, [P::kHeads, 512].
template <class P>
__device__ __forceinline__ void store_partial(float* rows, int count, int warp, int lane,
                                              const Output<P>& o) {
#pragma unroll
  for (int m = 0; m < P::kHeads / 16; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int head = 16 * m + lane / 4 + 8 * r;
      float* const to = rows + head * kValueColumns + warp * P::kWarpColumns + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < P::kWarpColumns / 8; ++n) {
        if (head < count) {
          *reinterpret_cast<float2*>(to + 8 * n) = make_float2(o[m][n][2 * r], o[m][n][2 * r + 1]);
        }
      }
    }
  }
}

// --- kernels ------------------------------------------------------------------------------------

// Blocks of 64 heads have eight warps, those of 32 four.
template <CacheFormat kFormat, int kDim_, int kParts, bool kPipelined, int kHeads>
struct DecodePlan {
  static constexpr bool kRaw = kFormat != CacheFormat::bf16;
  static_assert(kHeads == 64 || (!kPipelined && !kRaw));
  using Attention = AttendPlan<DType::bf16, kDim_, kParts, kPipelined,
                               kPipelined ? 4
                               : kRaw     ? 1
                                          : 2,
                               kHeads / 8>;
  static constexpr CacheFormat kCacheFormat = kFormat;
  static constexpr int kDim = kDim_;
  // The blocks of a multiprocessor that there are registers and shared memory for, on Hopper.
  static constexpr int kResident = kHeads == 64 ? 1 : 2;
  // A tile of rows in f8 stands behind what attend_cuda.cuh has.
  static constexpr int kRawOffset = Attention::kBytes;
  static_assert(kRawOffset % kUnitBytes == 0);
  static constexpr int kBytes = kRawOffset + RawRows<kFormat>::kBytes;
};

// What a block works on. Blocks count the blocks of heads first, which read the same rows, then
// segments.
struct Item {
  std::uint32_t i, s, segment;
  int first, heads;  // the first head, and how many there are
};
template <class P>
__device__ __forceinline__ Item item_of(const KernelParams& params, std::uint32_t block) {
  const int first = static_cast<int>(block % params.head_blocks) * P::kHeads;
  const std::uint32_t query = block / params.head_blocks / params.segments;
  return {query / params.s_q, query % params.s_q, block / params.head_blocks % params.segments,
          first, min(params.h_q - first, P::kHeads)};
}

template <class D>
__global__ void __launch_bounds__(D::Attention::kThreads, D::kResident)
    decode_kernel(const __grid_constant__ KernelParams params) {
  using P = typename D::Attention;
  constexpr CacheFormat kFormat = D::kCacheFormat;
  const P shared{shared_address(dynamic_shared<128>())};
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const Item item = item_of<P>(params, blockIdx.x);
  if (thread == 0) find_bounds(params, item.i, item.s, item.segment, shared.bounds());
  __syncthreads();  // the bounds are there
  const SegmentTiles tiles(params, shared.bounds());
  const int count = tiles.count();
  const std::uint32_t raw = shared.base + D::kRawOffset;
  // What copies the lane's rows of a tile. Behind the last tile the products have zeros copied to a
  // free place: no branch is among them.
  const auto start = [&](int tile, int warp, int lane) {
    const auto copy_of = [&](int to, const void* row, const void* scales, bool visible) {
      const auto *bytes = static_cast<const char*>(row), *apart = static_cast<const char*>(scales);
      if constexpr (D::kRaw) {
        return RawRowCopy<kFormat>(raw, to, bytes, apart, visible, lane);
      } else {
        return RowCopy<P::kDim>(shared.rows()[slot_of<P>(tile)], to, bytes, visible, lane);
      }
    };
    if (tile >= count) {
      return copies_of<P>(warp, lane,
                          [&](int to) { return copy_of(to, params.q.data, params.q.data, false); });
    }
    return start_tile(
        shared, tiles, tile, warp, lane, [&](int to, std::int32_t slot, bool visible) {
          const ChosenView& chosen = tiles.chosen(tile);
          const auto place = chosen.of_block.divide(visible ? static_cast<std::uint32_t>(slot) : 0);
          const void* const row = chosen.cache.row(place.quotient, place.remainder);
          if constexpr (kFormat == CacheFormat::fp8_584) {
            return copy_of(to, row, chosen.cache.scales_584(place.quotient, place.remainder),
                           visible);
          } else {
            return copy_of(to, row, row, visible);
          }
        });
  };
  // Rows in f8 are turned in the slot of the next tile if pipelined, otherwise in that of this one,
  // and copied for the tile behind it.
  const auto advance = [&](int tile, int warp, int lane) {
    if constexpr (D::kRaw) {
      if constexpr (P::kPipelined) ++tile;
      if (tile < count) {
        turn_rows<kFormat, D::kDim>(raw, shared.rows()[slot_of<P>(tile)], warp, lane);
      }
      if constexpr (P::kPipelined) {
        __syncwarp();  // the warp's raw rows may be replaced
      } else {
        __syncthreads();  // all rows are turned
      }
    }
    return start(tile + 1, warp, lane);
  };
  const auto copy_now = [&](const auto& copy) {
    copy_all(copy);
    cp_async_commit();
  };
  bring_first_entries(shared, tiles, warp, lane);
  copy_now(start(0, warp, lane));
  if constexpr (D::kRaw && P::kPipelined) {
    cp_async_wait<0>();
    __syncthreads();  // the entries of the second tile are there
    copy_now(advance(-1, warp, lane));
  }

  Queries<P> q;
  load_queries<P>(params.q.at(item.i, item.s, item.first), params.q.stride_h, item.heads, warp,
                  lane, q);
  Output<P> o = {};
  attend(shared, count, params.scale, thread, q, o, advance);

  // Computed anew: registers are scarce until here.
  const auto [i, s, segment, first, heads] = item_of<P>(params, forget(blockIdx.x));
  const int row = 8 * warp + lane / 4, head = first + row;
  const bool tells = lane % 4 == 0 && row < heads;
  RowState state = load_state(shared, thread);
  state.sum = quad_sum(state.sum);
  if (params.segments > 1) {
    const std::int64_t partial = std::int64_t{blockIdx.x} * P::kHeads;
    if (tells) params.partial_sums[partial + row] = {state.reference, state.sum};
    if (count > 0) {
      store_partial<P>(params.partial_out + partial * kValueColumns, heads, warp, lane, o);
    }
    return;
  }
  if (lane % 4 == 0) {
    const float sink = tells ? sink_of(params, head) : negative_infinity();
    shared.ends()[row].store(output_factor(state.sum, state.reference, sink));
    if (tells) store_lse(params, i, s, head, state.reference, state.sum);
  }
  __syncthreads();  // store_output reads the factors
  store_output(shared, params.out.at(i, s, first), params.out.stride_h, heads, warp, lane, o);
}

// Adds up the segments of one query and head in each block, in their order; blocks count heads
// first. A thread has four columns.
inline constexpr int kMergeThreads = kValueColumns / 4;
__global__ void __launch_bounds__(kMergeThreads)
    merge_kernel(const __grid_constant__ KernelParams params) {
  const auto heads = static_cast<std::uint32_t>(params.h_q);
  const std::uint32_t head = blockIdx.x % heads, query = blockIdx.x / heads;
  const auto row_of = [&](std::uint32_t segment) {
    return (std::int64_t{query} * params.segments + segment) * params.padded_heads + head;
  };
  float reference = kNoReference;
  for (std::uint32_t n = 0; n < params.segments; ++n) {
    reference = fmaxf(reference, params.partial_sums[row_of(n)].reference);
  }
  float sum = 0, all[4] = {};
  for (std::uint32_t n = 0; n < params.segments; ++n) {
    const PartialSums sums = params.partial_sums[row_of(n)];
    if (sums.sum == 0.0f) continue;  // nothing is visible, and perhaps nothing stored
    const float weight = ex2(sums.reference - reference);
    sum = fmaf(sums.sum, weight, sum);
    const float4 row = *reinterpret_cast<const float4*>(
        params.partial_out + row_of(n) * kValueColumns + 4 * threadIdx.x);
    all[0] = fmaf(row.x, weight, all[0]), all[1] = fmaf(row.y, weight, all[1]);
    all[2] = fmaf(row.z, weight, all[2]), all[3] = fmaf(row.w, weight, all[3]);
  }
  const std::uint32_t i = query / params.s_q, s = query % params.s_q;
  const int at = static_cast<int>(head);
  const float factor = output_factor(sum, reference, sink_of(params, at));
  *reinterpret_cast<uint2*>(params.out.at(i, s, at) + 8 * threadIdx.x) = make_uint2(
      pack_bf16(all[0] * factor, all[1] * factor), pack_bf16(all[2] * factor, all[3] * factor));
  if (threadIdx.x == 0) store_lse(params, i, s, at, reference, sum);
}

}  // namespace winnow::sparse_mla::decode_cuda_detail
