// Decode, sm90: what the blocks work on.
//
// decode_split_sm90.h says how groups of blocks share the queries' tiles, those of the first cache
// before those of the second. A piece that is a whole query writes the output; others write sums,
// which a second kernel merges.
#pragma once

#include <cstddef>
#include <cstdint>

#include "winnow/sparse_mla/attention_sm90.cuh"
#include "winnow/sparse_mla/decode/decode_split_sm90.h"
#include "winnow/sparse_mla/decode/decode_view.cuh"

namespace winnow::sparse_mla::decode_sm90_detail {

using namespace winnow::sparse_mla::attention_sm90;

// A piece that is no whole query leaves for each head the output before its division by the sum, in
// f16 over a power of two for each half, which loses an eighth of what bf16 would, and beside it
// those powers, the reference in base 2 and the sum.
inline constexpr std::int64_t kPartialRowBytes = kValueColumns * 2;
struct alignas(16) PartialSums {
  float reference, sum, power[2];
};

// Adds eight columns of a partial's row, times `weight`.
__device__ __forceinline__ void add_partial(float (&sum)[8], const uint4& row, float weight) {
  const std::uint32_t words[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack_f16(words[i]);
    sum[2 * i] = fmaf(pair.x, weight, sum[2 * i]);
    sum[2 * i + 1] = fmaf(pair.y, weight, sum[2 * i + 1]);
  }
}

// Queries with up to so many parts have a way of their own to be merged.
inline constexpr std::uint32_t kFewParts = Split::kFewParts;

struct KernelParams {
  static constexpr bool kPaged = false, kLogits = false;
  ChosenView chosen[2];  // of the cache and of the extra one
  HeadsView q, out;
  HeadsView lse;           // data may be null
  const float* attn_sink;  // may be null
  std::int64_t attn_sink_stride;
  LogitScale scale;
  int h_q;
  std::uint32_t s_q, head_blocks;
  std::uint32_t segments, segment_tiles, query_tiles;  // query_tiles = segments * segment_tiles
  std::uint32_t group_segments, whole_segments;        // of a group, and of all groups
  // Each group takes so many tiles of the queries from `cut_query` on, which have `cut_end` tiles.
  std::uint32_t cut_tiles, cut_query, cut_end;
  char* partial_out;          // [partials, 64, 512], f16
  PartialSums* partial_sums;  // [partials, 64]
  bool partials_in_pairs;     // how the columns of partial_out stand (store_output_row())
  float lse_of_nothing;       // in the place of -inf
};

// Of calls with block tables. The entries of the first list are positions of the sequence: its
// `indices` are the tables, topk_length is context_lens, and there is no second list.
struct PagedKernelParams : KernelParams {
  static constexpr bool kPaged = true;
  std::int32_t step;     // s_q where context_lens counts all queries of the step, otherwise 0
  std::uint32_t blocks;  // of the cache
  const float *q_scale, *kv_scale;  // of fp8_576; may be null
};

// What the values of a call are multiplied by, and how its logits are scaled.
template <CacheFormat kFormat, class Params>
__device__ __forceinline__ float value_scale_of(const Params& params) {
  if constexpr (kFormat == CacheFormat::fp8_576) {
    if (params.kv_scale != nullptr) return __ldg(params.kv_scale);
  }
  return 1;
}
template <CacheFormat kFormat, class Params>
__device__ __forceinline__ decltype(auto) logit_scale_of(const Params& params) {
  if constexpr (kFormat == CacheFormat::fp8_576) {
    const float of_queries = params.q_scale == nullptr ? 1.0f : __ldg(params.q_scale);
    return LogitScale{params.scale.factor,
                      params.scale.sign * (of_queries * value_scale_of<kFormat>(params))};
  } else {
    return (params.scale);  // where it is
  }
}

// Of blocks that work on queries side by side: what they leave to each other
// (decode_chain_sm90.cuh) of each item, that is 64 heads of a query, and tile. kComputes: of those
// that begin with the logits; their blocks have one piece each.
template <class Base, bool kComputes>
struct ChainParams : Base {
  static constexpr bool kLogits = kComputes;
  char* chain;              // [items, tiles], kChainTileBytes each
  float* maxima;            // [items, tiles, 64]: the largest logits of heads, in base 2
  std::uint32_t tiles;      // of a query, at most
  std::uint32_t run_tiles;  // of a block that makes weights
  __device__ std::int64_t at(std::uint32_t item, int tile) const {
    return std::int64_t{item} * tiles + tile;
  }
};

// The partial of a piece of a query that is cut: a group has at most two such pieces, of which this
// is the `number`th.
__device__ __forceinline__ std::uint32_t partial_of(const KernelParams& params, std::uint32_t group,
                                                    std::uint32_t number,
                                                    std::uint32_t head_block) {
  return (2 * group + number) * params.head_blocks + head_block;
}

// --- the table of the block's pieces -------------------------------------------------------------

struct Piece {
  std::uint32_t i, s;  // sequence and query
  std::int32_t first_head;
  std::int32_t partial;  // -1: the piece is the whole query. kLogits: its first tile in the query
  // Of each list: the first tile, how many tiles that hold entries, and how many entries of the
  // list count.
  std::int32_t first[2], tiles[2], entries[2];
};
static_assert(sizeof(Piece) == 40);

struct PiecePlan : Shared<Piece> {
  WINNOW_PLACE(i)
  WINNOW_PLACE(s)
  WINNOW_PLACE(first_head)
  WINNOW_PLACE(partial)
  WINNOW_PLACE(first)
  WINNOW_PLACE(tiles)
  WINNOW_PLACE(entries)
};

// How many entries of a list count.
template <class Params>
__device__ __forceinline__ int entries_of(const Params& params, int list, std::uint32_t i,
                                          std::uint32_t s) {
  const ChosenView& chosen = params.chosen[list];
  if (chosen.topk_length == nullptr) return chosen.topk;
  const int length =
      __ldg(chosen.topk_length + i * chosen.topk_length_stride_b + s * chosen.topk_length_stride_s);
  const int count = min(max(length, 0), chosen.topk);
  if constexpr (Params::kPaged) {
    if (params.step > 0) return rows_of_step(count, params.step, static_cast<int>(s));
  }
  return count;
}

class Pieces {
 public:
  template <class Params>
  __device__ __forceinline__ Pieces(const Params& params, Place<Piece[kMostPieces]> table)
      : table_(table) {
    const std::uint32_t group = blockIdx.x / params.head_blocks;
    from_ = min(group * params.cut_tiles, params.cut_end);
    to_ = min(from_ + params.cut_tiles, params.cut_end);
    const std::uint32_t first = from_ / params.query_tiles;
    cut_ = from_ < to_ ? static_cast<int>(ceil_div(to_, params.query_tiles) - first) : 0;
    first_segment_ = group * params.group_segments;
    const std::uint32_t end = min(first_segment_ + params.group_segments, params.whole_segments);
    count_ = cut_ + static_cast<int>(max(end, first_segment_) - first_segment_);
  }

  // Fills the table: every length is read once, when the kernel begins, so that whatever is written
  // to the lengths meanwhile, all roles go by the same tiles. A __syncthreads() follows.
  template <class Params>
  __device__ __forceinline__ void fill(const Params& params) const {
    const std::uint32_t group = blockIdx.x / params.head_blocks;
    const std::uint32_t head_block = blockIdx.x % params.head_blocks;
    for (int n = threadIdx.x; n < count_; n += blockDim.x) {
      std::uint32_t query, from, to, partial = 0;
      if (n < cut_) {
        const std::uint32_t number = from_ / params.query_tiles + n;
        const std::uint32_t begin = number * params.query_tiles;
        query = params.cut_query + number;
        from = max(from_, begin) - begin;
        to = min(to_ - begin, params.query_tiles);
        partial = partial_of(params, group, n, head_block);
      } else {
        const std::uint32_t segment = first_segment_ + n - cut_;
        query = segment / params.segments;
        from = segment % params.segments * params.segment_tiles;
        to = from + params.segment_tiles;
      }
      Piece piece;
      piece.i = query / params.s_q;
      piece.s = query % params.s_q;
      piece.first_head = static_cast<int>(head_block) * kHeads;
      const bool whole = from == 0 && to == params.query_tiles;
      piece.partial = Params::kLogits ? static_cast<int>(from)
                      : whole         ? -1
                                      : static_cast<int>(partial);
      int before = 0;  // tiles of the lists before this one that hold entries
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int count = entries_of(params, c, piece.i, piece.s);
        piece.first[c] = max(static_cast<int>(from) - before, 0);
        piece.tiles[c] =
            max(min(static_cast<int>(to) - before, tile_count(count)) - piece.first[c], 0);
        piece.entries[c] = count;
        before += tile_count(count);
      }
      store(n, piece);
    }
  }

  __device__ int count() const { return count_; }
  // What of a piece does not depend on a list.
  __device__ Piece operator[](int n) const {
    const PiecePlan from = at(n);
    Piece piece;
    piece.i = from.i().load();
    piece.s = from.s().load();
    piece.first_head = from.first_head().load();
    piece.partial = from.partial().load();
    return piece;
  }
  __device__ int partial(int n) const { return at(n).partial().load(); }
  // The slot of its first tile: tile t of a query belongs to slot t % 2.
  template <class Params>
  __device__ int first_slot(int n) const {
    if constexpr (Params::kLogits) return partial(n) & 1;
    return 0;
  }
  __device__ int tiles(int n) const { return tiles(n, 0) + tiles(n, 1); }
  __device__ int tiles(int n, int list) const { return at(n).tiles()[list].load(); }
  __device__ int first(int n, int list) const { return at(n).first()[list].load(); }
  __device__ int entries(int n, int list) const { return at(n).entries()[list].load(); }

 private:
  __device__ PiecePlan at(int n) const { return {table_[n].address}; }
  __device__ __forceinline__ void store(int n, const Piece& piece) const {
    const PiecePlan to = at(n);
    to.i().store(piece.i);
    to.s().store(piece.s);
    to.first_head().store(piece.first_head);
    to.partial().store(piece.partial);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      to.first()[c].store(piece.first[c]);
      to.tiles()[c].store(piece.tiles[c]);
      to.entries()[c].store(piece.entries[c]);
    }
  }

  Place<Piece[kMostPieces]> table_;
  std::uint32_t from_, to_;      // the group's tiles of the queries that are cut
  std::uint32_t first_segment_;  // of its whole ones
  int cut_, count_;              // pieces of the former, and of both
};

// The tiles of the block's pieces in turn.
template <class Params>
class TileStream {
 public:
  __device__ TileStream(const Params& params, const Pieces& pieces)
      : params_(params), pieces_(pieces) {}

  // Moves to the next tile; false where there is none.
  __device__ __forceinline__ bool advance() {
    ++tile_;
    if (--left_ <= 0) return begin_list();
    if constexpr (Params::kPaged) {
      position_ += kTileRows;
    } else {
      list_ += kTileRows;
    }
    entries_ -= kTileRows;
    return true;
  }

  __device__ int piece() const { return piece_; }
  __device__ int cache() const { return cache_; }
  __device__ int slot() const { return (tile_ ^ first_slot_) & 1; }
  __device__ bool begins_piece() const { return tile_ == 0; }
  // The entries of the tile.
  __device__ __forceinline__ TileEntries load(int lane) const {
    if constexpr (Params::kPaged) {
      const auto slot_of = [&](int row) -> std::int32_t {
        if (row >= entries_) return -1;
        const ChosenView& rows = params_.chosen[0];
        const auto place = rows.of_block.divide(position_ + row);
        const auto block = static_cast<std::uint32_t>(__ldg(list_ + place.quotient));
        if (block >= params_.blocks) return -1;  // negative ones, too
        return static_cast<std::int32_t>(block * rows.cache.block_size + place.remainder);
      };
      return {slot_of(lane), slot_of(lane + 32)};
    } else {
      return load_tile(list_, 0, entries_, lane);
    }
  }

 private:
  __device__ __forceinline__ bool begin_list() {
    do {
      cache_ ^= 1;
      if (cache_ == 0) {
        if (++piece_ >= pieces_.count()) return false;
        tile_ = 0;
        first_slot_ = pieces_.template first_slot<Params>(piece_);
      }
      left_ = pieces_.tiles(piece_, cache_);
    } while (left_ <= 0);
    const ChosenView& chosen = params_.chosen[cache_];
    const Piece at = pieces_[piece_];
    const int first = pieces_.first(piece_, cache_) * kTileRows;
    if constexpr (Params::kPaged) {
      list_ = chosen.indices + at.i * chosen.indices_stride_b;
      position_ = first;
    } else {
      list_ =
          chosen.indices + at.i * chosen.indices_stride_b + at.s * chosen.indices_stride_s + first;
    }
    entries_ = pieces_.entries(piece_, cache_) - first;
    return true;
  }

  const Params& params_;
  const Pieces& pieces_;
  int piece_ = -1, cache_ = 1;
  int tile_ = -1, first_slot_ = 0;
  int left_ = 0;  // tiles of the list, this one included
  // The list from the tile's first entry on, or the sequence's block table, and how many entries
  // count from there on.
  const std::int32_t* list_ = nullptr;
  int entries_ = 0;
  int position_ = 0;  // paged: of the tile's first entry
};

}  // namespace winnow::sparse_mla::decode_sm90_detail
