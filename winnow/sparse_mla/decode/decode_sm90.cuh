// Decode, sm90: the kernels.
//
// A block takes its pieces (decode_pieces_sm90.cuh) in turn. The consumers are those of
// attention_sm90.cuh; the others bring the rows (decode_rows_sm90.cuh, decode_turn_sm90.cuh). Each
// kernel is there twice: kShort is for calls that are over after some tiles, in which what is done
// once takes the time. Both give the same bits. Calls with block tables have kernels of their own
// (PagedKernelParams), never kShort. With params of kLogits the consumers make logits alone
// (decode_logits_sm90.cuh).
#pragma once

#include <cstdint>

#include "winnow/device/common/launch.cuh"
#include "winnow/sparse_mla/decode/decode_logits_sm90.cuh"
#include "winnow/sparse_mla/decode/decode_rows_sm90.cuh"
#include "winnow/sparse_mla/decode/decode_turn_sm90.cuh"
#include "winnow/sparse_mla/lse.cuh"

namespace winnow::sparse_mla::decode_sm90_detail {

// The warpgroups of a block: two consumers, and one that copies, or for rows in f8 two of which two
// warps copy and six turn the rows into bf16.
template <CacheFormat kFormat>
inline constexpr int kBlockThreads = kFormat == CacheFormat::bf16 ? 384 : 512;

// Registers of a thread. An increase waits for what decreases give back: those of all warpgroups
// must not exceed what they begin with, 168 each of three, or 128 each of four.
template <CacheFormat kFormat>
inline constexpr int kMultiplyRegisters = kFormat == CacheFormat::bf16 ? 200 : 192;
template <CacheFormat kFormat>
inline constexpr int kBringRegisters = kFormat == CacheFormat::bf16 ? 104 : 64;

// --- the consumers' pieces ----------------------------------------------------------------------

__device__ __forceinline__ float sink_of(const KernelParams& params, int head) {
  if (params.attn_sink == nullptr) return negative_infinity();
  return __fmul_rn(__ldg(params.attn_sink + head * params.attn_sink_stride), kLog2e);
}

__device__ __forceinline__ void store_lse(const KernelParams& params, std::uint32_t i,
                                          std::uint32_t s, int head, float reference, float sum) {
  if (!params.lse.present()) return;
  *reinterpret_cast<float*>(params.lse.at(i, s, head)) =
      lse_of(reference, sum, params.lse_of_nothing);
}

// The largest magnitude in a thread's row r of the consumer's half; kFinite: of finite values.
template <bool kFinite>
__device__ __forceinline__ float largest_of(const Output& o, int r) {
  float largest = 0;
#pragma unroll
  for (int piece = 0; piece < 2; ++piece) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float x = fabsf(o[piece][4 * j + 2 * r + e]);
        largest = fmaxf(largest, !kFinite || x < infinity() ? x : 0.0f);
      }
    }
  }
  return largest;
}

// What the row is multiplied by to become f16: the power of two that brings its largest finite
// value to 2^14 or more, below 2^15. In short calls values are looked at one by one only where some
// are infinite.
template <bool kShort>
__device__ __forceinline__ float factor_to_f16(const Output& o, int r) {
  float largest = largest_of<!kShort>(o, r);
  if (kShort && __any_sync(kFullWarp, largest == infinity())) largest = largest_of<true>(o, r);
  const std::uint32_t exponent = __float_as_uint(quad_max(largest)) >> 23;
  return __uint_as_float(min(268u - exponent, 253u) << 23);  // its inverse is no subnormal number
}
__device__ __forceinline__ float inverse_power(float power) {
  return __uint_as_float((254u << 23) - __float_as_uint(power));
}

// The block's pieces, and where the results of one go.
template <CacheFormat kFormat, bool kShort, class Params>
struct Work {
  const Params& params;
  const Pieces& pieces;

  // Writes the consumer's half of the piece's output, and consumer 0 what else there is of a head.
  template <int kConsumer>
  __device__ __forceinline__ void store(int n, int warp, int lane, const RowState& state,
                                        const Output& o) const {
    const Piece piece = pieces[n];
    bool is_first = kConsumer == 0;
    if constexpr (kConsumer == kEither) is_first = number_of<kConsumer>() == 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = 16 * warp + lane / 4 + 8 * r;
      const int head = piece.first_head + row;
      const bool exists = head < params.h_q;
      const bool first = exists && (lane & 3) == 0, tells = is_first && first;
      if (piece.partial < 0) {
        const float sink = exists ? sink_of(params, head) : negative_infinity();
        if (tells) store_lse(params, piece.i, piece.s, head, state.reference[r], state.sum[r]);
        store_output_row<kConsumer>(
            params.out.at(piece.i, piece.s, exists ? head : 0), exists, r,
            output_factor(state.sum[r], state.reference[r], sink) * value_scale_of<kFormat>(params),
            lane, o);
      } else {
        const std::uint32_t part = piece.partial * kHeads + row;
        const float factor = factor_to_f16<kShort>(o, r);
        const float power = inverse_power(factor) * value_scale_of<kFormat>(params);
        PartialSums& sums = params.partial_sums[part];
        if (tells) sums.reference = state.reference[r], sums.sum = state.sum[r];
        if (first) sums.power[is_first ? 0 : 1] = power;
        store_output_row<kConsumer, pack_f16, true, kShort>(
            params.partial_out + part * kPartialRowBytes, exists, r, factor, lane, o);
      }
    }
  }
};

// --- a consumer's pieces ------------------------------------------------------------------------

// The role of a consumer, kConsumer 0, 1 or kEither. All tiles share their instructions, which
// leaves more room for others' in the instruction caches; P V of the tile before is queued between
// the logits of this one, so that its rows are replaced before the last chunks of this tile come.
//
// Where rows in bf16 are copied with little ado (copy_blocks_role()), the consumers have orders of
// their own: consumer 0 queues P V of the tile before ahead of its logits, consumer 1 behind them.
// So the softmax of each runs while the other multiplies, and the rows of consumer 0 land while
// consumer 1 needs none:
//
//   consumer 0   Q K 0 | softmax  | P V 0        | P V 1 | Q K 2 | softmax ...
//   consumer 1          Q K 1     | P V 0 | softmax | P V 1 |     Q K 3 ...
template <int kConsumer, class P, CacheFormat kFormat, bool kShort, class Params>
__device__ __forceinline__ void consumer_role(const Work<kFormat, kShort, Params>& work,
                                              const LogitScale& scale, P shared) {
  constexpr bool kOwnOrders =
      kConsumer != kEither && Params::kPaged && kFormat == CacheFormat::bf16;
  const int consumer = number_of<kConsumer>(), other = 1 - consumer;
  const int thread = threadIdx.x & 127;
  const int warp = thread >> 5;
  const int lane = thread & 31;
  std::uint32_t own_uses = 0, other_uses = 0;  // of the slots: the parity of their barriers
  std::uint32_t q_uses = 0;                    // pieces with tiles

  const auto scores = [&]<int kGroup>(int tile, float(&s)[32]) {
    multiply_scores_of<kConsumer, kGroup, kFormat>(shared, consumer, own_uses & 1, tile == consumer,
                                                   q_uses & 1, s);
  };

  int next_tiles = work.pieces.tiles(0);  // loaded a piece ahead
  for (int piece = 0; piece < work.pieces.count(); ++piece) {
    const int tiles = next_tiles;
    if (piece + 1 < work.pieces.count()) next_tiles = work.pieces.tiles(piece + 1);

    RowState state{
        {kNoReference, kNoReference}, {0, 0}, {negative_infinity(), negative_infinity()}};
    Output o;
#pragma unroll
    for (int i = 0; i < 64; ++i) o[0][i] = o[1][i] = 0;

    for (int tile = consumer; tile < tiles; tile += 2) {
      float s[32];
      std::uint32_t p[16];
      const bool first = consumer == 0 && tile == 0;  // of the piece
      const auto queue_other = [&] {
        multiply_other_values<kOwnOrders>(shared, consumer, other_uses & 1, warp, lane, state, o);
        ++other_uses;
      };
      if constexpr (kOwnOrders && kConsumer == 0) {
        if (!first) {
          queue_other();
          wgmma_wait<1>();  // the first half
          release_group<2>(shared, other);
        }
        scores.template operator()<0>(tile, s);
        wgmma_wait<1>();  // the second half
        if (!first) release_group<3>(shared, other);
        wgmma_pin(o[0]);
        wgmma_pin(o[1]);
      } else {
        scores.template operator()<0>(tile, s);
      }
      scores.template operator()<1>(tile, s);
      if (!kOwnOrders && !first) queue_other();
      scores.template operator()<2>(tile, s);
      if (!kOwnOrders && !first) release_values<2, 1>(shared, other, o);
      scores.template operator()<3>(tile, s);
      const auto mask = shared.mask()[consumer].load();
      wgmma_wait<0>();
      wgmma_pin(s);
      if (tile + 2 >= tiles) shared.q_free().arrive_warp();

      hide_logits(scale, mask, lane, s);
      float factors[2];
      if constexpr (kOwnOrders) {
        float top[2];
        thread_maxima(scale, s, top);
        wgmma_pin(top);  // found before P of the other tile is awaited
        if constexpr (kConsumer == 1) queue_other();
        raise_exceeded(top, state, factors);
      } else {
        softmax_reference(scale, s, state, factors);
      }
      softmax_weights(scale, s, p, state);
      store_probabilities(shared, consumer, warp, lane, p);
      // Consumer 1 has P V of the other tile under way until here, which also releases its rows; P
      // then goes to the other consumer while the first half of P V of this tile runs.
      constexpr bool kBetween = kOwnOrders && kConsumer == 1;
      const auto hand = [&] { hand_over<kOwnOrders>(shared, consumer, warp, lane, state); };
      if constexpr (kBetween) {
        release_values<2>(shared, other, o);
      } else {
        hand();
      }
      rescale(o, factors);
      multiply_own_values(shared, consumer, p, o, [&] {
        if constexpr (kBetween) hand();
      });
      release_values<0>(shared, consumer, o);
      wgmma_pin(p);
      ++own_uses;
    }
    if (tiles > 0) {
      if (consumer == 1 && tiles == 1) shared.q_free().arrive_warp();  // it has no use for Q
      if ((tiles - 1) % 2 != consumer) {
        multiply_other_values<kOwnOrders>(shared, consumer, other_uses & 1, warp, lane, state, o);
        release_values<2>(shared, other, o);
        ++other_uses;
      }
      merge_consumers<false>(shared, consumer, q_uses & 1, warp, lane, state);
      ++q_uses;
    }
    work.template store<kConsumer>(piece, warp, lane, state, o);
  }
}

// --- kernels ------------------------------------------------------------------------------------

template <CacheFormat kFormat, int kDim, bool kShort, class Params>
__global__ void __launch_bounds__(kBlockThreads<kFormat>, 1)
    decode_kernel(const __grid_constant__ Params params) {
  const DecodePlan<kDim> shared{shared_address(dynamic_shared<1024>())};
  const Plan<kDim> consumers = shared.consumers();
  constexpr bool kCopied = kFormat == CacheFormat::bf16;
  // The merge is not let in early, by allow_next_kernel(): its blocks would gather on what few
  // multiprocessors are free, which costs more than it saves.
  if (threadIdx.x == 0) {
    init_barriers(consumers, [](int, int group) {
      return kCopied ? copied_group_arrivals(group) : turned_group_arrivals<kFormat>(group);
    });
    if (!kCopied) init_landed_barriers(shared);
    fence_mbarrier_init();
  }
  const Pieces pieces(params, shared.pieces());
  pieces.fill(params);
  __syncthreads();  // the barriers and the table are there

  // Each role is one branch, as setmaxnreg wants it.
  const Work<kFormat, kShort, Params> work{params, pieces};
  const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
  if (kShort && warpgroup < 2) {
    setmaxnreg_inc<kMultiplyRegisters<kFormat>>();
    if constexpr (Params::kLogits) {
      logits_role<kFormat>(params, pieces, consumers);
    } else {
      consumer_role<kEither>(work, logit_scale_of<kFormat>(params), consumers);
    }
  } else if (!kShort && warpgroup == 0) {
    setmaxnreg_inc<kMultiplyRegisters<kFormat>>();
    consumer_role<0>(work, logit_scale_of<kFormat>(params), consumers);
  } else if (!kShort && warpgroup == 1) {
    setmaxnreg_inc<kMultiplyRegisters<kFormat>>();
    consumer_role<1>(work, logit_scale_of<kFormat>(params), consumers);
  } else {
    setmaxnreg_dec<kBringRegisters<kFormat>>();
    const int thread = __shfl_sync(kFullWarp, threadIdx.x, 0) - 2 * 128;  // the warp's first one
    if (thread < kCopyThreads<kFormat>) {
      copy_role<kFormat, kDim>(params, pieces, shared);
    } else if constexpr (!kCopied) {
      turn_role<kFormat, kDim, Params>(pieces, shared, (thread - kCopyThreads<kFormat>) / 32);
    }
  }
}

}  // namespace winnow::sparse_mla::decode_sm90_detail
