// Decode, sm90: queries in one go, by many blocks side by side.
//
// Every sum of such a query is a chain over its entries, so that its bits depend on nothing else.
// An item is 64 heads of a query. If there are enough items, one block forms all chains of an item.
// If there are few, three kernels form the same chains: logits do not depend on each other
// (decode_logits_sm90.cuh); the weights P of a tile depend on earlier tiles only by the references,
// which follow from the maxima of tiles; and the output's columns do not depend on each other.
// Each does what consumers of attention_sm90.cuh do, in the same order with the same roundings.
#pragma once

#include <cstddef>
#include <cstdint>

#include "winnow/device/common/launch.cuh"
#include "winnow/sparse_mla/decode/decode_logits_sm90.cuh"
#include "winnow/sparse_mla/decode/decode_rows_sm90.cuh"
#include "winnow/sparse_mla/decode/decode_sm90.cuh"
#include "winnow/sparse_mla/decode/decode_turn_sm90.cuh"

namespace winnow::sparse_mla::decode_sm90_detail {

// --- weights -------------------------------------------------------------------------------------

// What replaces the logits of a tile: P as wgmma reads it, the references of its heads, and what
// each thread of a consumer would add to its sums.
struct alignas(1024) ChainWeights {
  Chunk weights;
  float references[kHeads];
  float sums[128][2];
};
inline constexpr std::uint32_t kChainWeightsBytes =
    kChunkBytes + sizeof(ChainWeights::references) + sizeof(ChainWeights::sums);
static_assert(kChainWeightsBytes <= kChainTileBytes);

inline constexpr int kWeightsThreads = 128;

// A block has a run of tiles of an item; blockIdx.y counts the runs.
template <class Params>
__global__ void __launch_bounds__(kWeightsThreads)
    weights_kernel(const __grid_constant__ Params params) {
  allow_next_kernel();
  const std::uint32_t item = blockIdx.x, query = item / params.head_blocks;
  int tiles = 0;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    tiles += tile_count(entries_of(params, c, query / params.s_q, query % params.s_q));
  }
  const int first = static_cast<int>(blockIdx.y * params.run_tiles);
  const int end = min(first + static_cast<int>(params.run_tiles), tiles);
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  const int row = 16 * warp + lane / 4;
  wait_for_kernel_before();  // for the logits
  if (first >= end) return;

  const float* const maxima = params.maxima + params.at(item, 0) * kHeads + row;
  RowState state{{kNoReference, kNoReference}, {0, 0}, {negative_infinity(), negative_infinity()}};
  const auto raise = [&](float(&top)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (top[r] > state.reference[r] + kLazy) state.reference[r] = top[r];
    }
  };
  // The tiles before the run. Loads of many maxima are in flight at once.
  constexpr int kAtOnce = 16;
  for (int begin = 0; begin < first; begin += kAtOnce) {
    float top[kAtOnce][2];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        top[n][r] = begin + n < first ? maxima[(begin + n) * kHeads + 8 * r] : negative_infinity();
      }
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) raise(top[n]);
  }
  for (int tile = first; tile < end; ++tile) {
    char* const place = params.chain + params.at(item, tile) * kChainTileBytes;
    float s[32];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const float4 four = reinterpret_cast<const float4*>(place)[128 * k + thread];
      s[4 * k] = four.x, s[4 * k + 1] = four.y, s[4 * k + 2] = four.z, s[4 * k + 3] = four.w;
    }
    float top[2] = {maxima[tile * kHeads], maxima[tile * kHeads + 8]};
    raise(top);
    state.sum[0] = state.sum[1] = 0;
    std::uint32_t p[16];
    softmax_weights(params.scale, s, p, state);
    __syncthreads();  // all threads have read the logits
    auto* const references = reinterpret_cast<float*>(place + offsetof(ChainWeights, references));
    auto* const sums = reinterpret_cast<float2*>(place + offsetof(ChainWeights, sums));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        std::uint32_t w[4];
#pragma unroll
        for (int b = 0; b < 4; ++b) w[b] = p[2 * (4 * half + b) + r];
        quad_transpose(w, lane);
        *reinterpret_cast<uint4*>(place + chunk_offset(row + 8 * r, 4 * half + (lane & 3))) =
            make_uint4(w[0], w[1], w[2], w[3]);
      }
      if ((lane & 3) == 0) references[row + 8 * r] = state.reference[r];
    }
    sums[thread] = make_float2(state.sum[0], state.sum[1]);
  }
}

// --- values --------------------------------------------------------------------------------------

inline constexpr int kValueStages = 8;

struct ValuesLayout {
  Chunk values[kValueStages][2];
  ChainWeights weights[kValueStages];
  std::uint32_t scales[kValueStages][kTileRows][4];
  Piece pieces[kMostPieces];  // one is used
  // [stages]; who arrives -> who waits.
  Barrier landed[kValueStages];        // copies -> the warps that turn them
  Barrier values_full[kValueStages];   // these warps, or copies of bf16 -> consumers
  Barrier weights_full[kValueStages];  // bulk copies -> consumers
  Barrier empty[kValueStages];         // consumers -> all copies
};
struct ValuesPlan : Shared<ValuesLayout> {
  WINNOW_PLACE(values)
  WINNOW_PLACE(weights)
  WINNOW_PLACE(scales)
  WINNOW_PLACE(pieces)
  WINNOW_PLACE(landed)
  WINNOW_PLACE(values_full)
  WINNOW_PLACE(weights_full)
  WINNOW_PLACE(empty)
};
static_assert(sizeof(ValuesLayout) <= 232448 && offsetof(ValuesLayout, scales) % 16 == 0);

// A block has a consumer warpgroup, warps that bring rows, and a warp that brings weights.
template <CacheFormat kFormat>
inline constexpr int kBringThreads = kFormat == CacheFormat::bf16 ? kGatherThreads : 256;
template <CacheFormat kFormat>
inline constexpr int kValuesThreads = 128 + kBringThreads<kFormat> + 32;

// The stage of a tile, and the parity of its barriers.
class Stage {
 public:
  __device__ int number() const { return number_; }
  __device__ std::uint32_t parity() const { return parity_; }
  __device__ void advance() {
    if (++number_ < kValueStages) return;
    number_ = 0;
    parity_ ^= 1;
  }

 private:
  int number_ = 0;
  std::uint32_t parity_ = 0;
};

// Copies the block's columns, those of chunks `chunk` to `chunk` + kChunks - 1, of all tiles. With
// f8 it copies their whole group of two chunks, even if the block has only one of them.
template <CacheFormat kFormat, int kDim, int kChunks, class Params>
__device__ __forceinline__ void copy_values_role(const Params& params, const Pieces& pieces,
                                                 ValuesPlan shared, int chunk) {
  const int thread = threadIdx.x - 128, lane = thread & 31;
  const ValuesPlan mine = for_thread(shared, thread);
  const std::uint64_t keep = policy_evict_last();
  TileStream<Params> stream(params, pieces);
  // Entries are loaded some tiles ahead: a tile takes less time than they do.
  constexpr int kAhead = 4;
  struct {
    TileEntries entries;
    int cache;
    bool exists;
  } ahead[kAhead];
  bool more = true;
  const auto load = [&](auto& tile) {
    if (more) more = stream.advance();
    tile.exists = more;
    if (!more) return;
    tile.entries = stream.load(lane);
    tile.cache = stream.cache();
  };
#pragma unroll
  for (auto& tile : ahead) load(tile);
  Stage stage;
  const auto copy = [&](auto& tile) {
    const int at = stage.number();
    const ChosenView& chosen = params.chosen[tile.cache];
    const std::uint64_t mask = tile_mask(tile.entries, chosen.cache.slots);
    const auto to = mine.values()[at];
    const auto wait = [&] { shared.empty()[at].wait(stage.parity() ^ 1, "values", at); };
    if constexpr (kFormat == CacheFormat::bf16) {
      const GatherRows rows = chosen_rows(chosen, tile.entries, mask, thread);
      load(tile);
      wait();
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        gather_chunk(to[i].address, rows, chunk + i, thread, keep);
      }
      shared.values_full()[at].arrive_cp_async();
    } else {
      const RawRows<kFormat> rows(chosen, tile.entries, mask, thread);
      load(tile);
      wait();
      // An ordinary arrival passes on that the stage was released; those of copies do not.
      if (thread == 0) shared.landed()[at].arrive();
      rows.copy(to[0].address, chunk / 2 * 2 * kChunkColumns, thread, keep);
      if (kDim == 512 && chunk / 2 == 3) {
        rows.copy(to[1].address, RowOf<kFormat>::kRopeOffset, thread, keep);
      }
      rows.copy_scales(mine.scales()[at].address, thread, keep);
      shared.landed()[at].arrive_cp_async();
    }
    stage.advance();
  };
  for (;;) {
#pragma unroll
    for (auto& tile : ahead) {
      if (!tile.exists) return;
      copy(tile);
    }
  }
}

// Turns the copied rows into bf16. Chunk c of the group lies in chunk c of the stage.
template <CacheFormat kFormat, int kChunks>
__device__ __forceinline__ void turn_values_role(ValuesPlan shared, int tiles, int chunk,
                                                 int warp) {
  const RowTurner<kFormat> turner;
  const int first = chunk % 2, end = first + kChunks;
  for (int unit = warp; unit < tiles * kQuarters; unit += kTurnWarps) {
    const int tile = unit / kQuarters, at = tile % kValueStages;
    shared.landed()[at].wait(tile / kValueStages & 1, "turn", at);
    turner.turn(shared.values()[at][0].address, shared.scales()[at].address, chunk - first,
                unit % kQuarters, first, end);
    shared.values_full()[at].arrive_warp();
  }
}

// Copies the weights of all tiles. One thread.
__device__ __forceinline__ void copy_weights_role(const char* from, ValuesPlan shared, int tiles) {
  const std::uint64_t keep = policy_evict_last();
  Stage stage;
  for (int tile = 0; tile < tiles; ++tile, stage.advance()) {
    const int at = stage.number();
    shared.empty()[at].wait(stage.parity() ^ 1, "weights", at);
    const auto full = shared.weights_full()[at];
    full.arrive_expect(kChainWeightsBytes);
    bulk_load(shared.weights()[at].address, from + std::int64_t{tile} * kChainTileBytes,
              kChainWeightsBytes, full.address, keep);
  }
}

// The chains of the block's columns: o = o * factor + P V for each tile in turn.
template <CacheFormat kFormat, int kChunks, class Params>
__device__ __forceinline__ void values_role(const Params& params, const Piece& piece,
                                            ValuesPlan shared, int tiles, int chunk) {
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  const int row = 16 * warp + lane / 4;
  float reference[2] = {kNoReference, kNoReference}, factors[2];
  float sums[2][2] = {};  // [r][consumer]: a consumer has every second tile
  bool raises;
  float o[32 * kChunks];
#pragma unroll
  for (float& value : o) value = 0;

  Stage next;
  // Waits for a tile and takes over its references, as raise_reference() does.
  const auto begin_tile = [&](int tile) {
    const int at = next.number();
    shared.weights_full()[at].wait(next.parity(), "values", 10 + at);
    const std::uint32_t weights = shared.weights()[at].address;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float raised = ld_shared<float>(weights + offsetof(ChainWeights, references) +
                                            (row + 8 * r) * sizeof(float));
      const float sum = ld_shared<float>(weights + offsetof(ChainWeights, sums) +
                                         (2 * thread + r) * sizeof(float));
      factors[r] = ex2(reference[r] - raised);
      reference[r] = raised;
#pragma unroll
      for (int consumer = 0; consumer < 2; ++consumer) {
        const float shrunk = __fmul_rn(sums[r][consumer], factors[r]), grown = shrunk + sum;
        sums[r][consumer] = (tile & 1) == consumer ? grown : shrunk;
      }
    }
    raises = __any_sync(kFullWarp, factors[0] != 1.0f || factors[1] != 1.0f);
    shared.values_full()[at].wait(next.parity(), "values", 20 + at);
    if constexpr (kFormat != CacheFormat::bf16) fence_proxy_async_shared();
    next.advance();
  };

  if (tiles > 0) begin_tile(0);
  Stage stage;
  for (int tile = 0; tile < tiles; ++tile, stage.advance()) {
    const int at = stage.number();
    if (raises) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int j = 0; j < 8 * kChunks; ++j) {
          o[4 * j + 2 * r] *= factors[r];
          o[4 * j + 2 * r + 1] *= factors[r];
        }
      }
    }
    const std::uint32_t half = kFormat == CacheFormat::bf16 ? 0 : chunk % 2;
    const std::uint64_t p =
        descriptor_offset(descriptor_k_major(shared.base), shared.offset(shared.weights()[at]));
    const std::uint64_t v =
        descriptor_offset(descriptor_mn_major(shared.base),
                          shared.offset(shared.values()[at][static_cast<int>(half)]));
    wgmma_fence();
#pragma unroll
    for (int k16 = 0; k16 < 4; ++k16) {
      if constexpr (kChunks == 2) {
        wgmma_m64n128k16<Major::K, Major::MN>(o, descriptor_offset(p, 32 * k16),
                                              descriptor_offset(v, 2048 * k16), true);
      } else {
        wgmma_m64n64k16<Major::K, Major::MN>(o, descriptor_offset(p, 32 * k16),
                                             descriptor_offset(v, 2048 * k16), true);
      }
    }
    wgmma_commit();
    if (tile + 1 < tiles) begin_tile(tile + 1);
    wgmma_wait<0>();
    wgmma_pin(o);
    shared.empty()[at].arrive_warp();
  }

#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int head = piece.first_head + row + 8 * r;
    const bool exists = head < params.h_q;
    const float sum = quad_sum(sums[r][0]) + quad_sum(sums[r][1]);
    const float sink = exists ? sink_of(params, head) : negative_infinity();
    const float factor = output_factor(sum, reference[r], sink) * value_scale_of<kFormat>(params);
    if (chunk == 0 && exists && (lane & 3) == 0) {
      store_lse(params, piece.i, piece.s, head, reference[r], sum);
    }
    char* const out = params.out.at(piece.i, piece.s, exists ? head : 0) +
                      (chunk * kChunkColumns + 8 * (lane & 3)) * 2;
#pragma unroll
    for (int part = 0; part < 2 * kChunks; ++part) {
      std::uint32_t w[4];
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const int i = 4 * (4 * part + b) + 2 * r;
        w[b] = pack_bf16(o[i] * factor, o[i + 1] * factor);
      }
      quad_transpose(w, lane);
      if (exists) store_streaming(out + 64 * part, w[0], w[1], w[2], w[3]);
    }
  }
}

// A block has kChunks chunks of the columns of an item; blockIdx.y counts these.
template <CacheFormat kFormat, int kDim, int kChunks, class Params>
__global__ void __launch_bounds__(kValuesThreads<kFormat>, 1)
    values_kernel(const __grid_constant__ Params params) {
  const ValuesPlan shared{shared_address(dynamic_shared<1024>())};
  constexpr bool kCopied = kFormat == CacheFormat::bf16;
  if (threadIdx.x == 0) {
    for (int at = 0; at < kValueStages; ++at) {
      shared.landed()[at].init(kRawCopyThreads + 1);
      shared.values_full()[at].init(kCopied ? kGatherThreads : kTurnedGroupArrivals);
      shared.weights_full()[at].init(1);
      shared.empty()[at].init(kWarpsPerConsumer * kWarpArrival);
    }
    fence_mbarrier_init();
  }
  const Pieces pieces(params, shared.pieces());
  pieces.fill(params);
  __syncthreads();  // the barriers and the table are there

  const int tiles = pieces.tiles(0), chunk = static_cast<int>(blockIdx.y) * kChunks;
  const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0) - 4;
  constexpr int kBringWarps = kBringThreads<kFormat> / 32, kCopyWarps = kCopyThreads<kFormat> / 32;
  if (warp < 0) {
    values_role<kFormat, kChunks>(params, pieces[0], shared, tiles, chunk);
  } else if (warp < kCopyWarps) {
    copy_values_role<kFormat, kDim, kChunks>(params, pieces, shared, chunk);
  } else if (warp == kBringWarps) {
    wait_for_kernel_before();  // only the weights come from the kernels before
    if ((threadIdx.x & 31) == 0) {
      copy_weights_role(params.chain + params.at(blockIdx.x, 0) * kChainTileBytes, shared, tiles);
    }
  } else if constexpr (!kCopied) {
    turn_values_role<kFormat, kChunks>(shared, tiles, chunk, warp - kCopyWarps);
  }
}

}  // namespace winnow::sparse_mla::decode_sm90_detail
