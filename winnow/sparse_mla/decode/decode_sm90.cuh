// Decode, sm90: the kernels.
//
// A block takes its pieces (decode_pieces_sm90.cuh) in turn. The consumers are those of
// attention_sm90.cuh; the others bring the rows (decode_rows_sm90.cuh, decode_turn_sm90.cuh). Each
// kernel is there twice: kShort is for calls that are over after some tiles, in which what is done
// once takes the time. Both give the same bits.
#pragma once

#include <cstdint>

#include "winnow/device/common/launch.cuh"
#include "winnow/sparse_mla/decode/decode_rows_sm90.cuh"
#include "winnow/sparse_mla/decode/decode_turn_sm90.cuh"

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
  return __ldg(params.attn_sink + head * params.attn_sink_stride) * kLog2e;
}

__device__ __forceinline__ void store_lse(const KernelParams& params, std::uint32_t i,
                                          std::uint32_t s, int head, float reference, float sum) {
  if (!params.lse.present()) return;
  // log2(0) is -inf.
  *reinterpret_cast<float*>(params.lse.at(i, s, head)) = (reference + log2f(sum)) * kLn2;
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

// The pieces, as consumer_role() wants them.
template <CacheFormat kFormat, bool kShort>
struct Work {
  static constexpr bool kParts = false;
  // The way round of a slot is what decides the speed: its places are released early.
  static constexpr int kValuesBefore = 2;
  static constexpr bool kStoredRows = kFormat != CacheFormat::bf16;
  const KernelParams& params;
  const Pieces& pieces;

  __device__ int first() const { return 0; }
  __device__ int step() const { return 1; }
  __device__ int end() const { return pieces.count(); }
  __device__ __forceinline__ int count(int piece) const {
    return pieces.tiles(piece, 0) + pieces.tiles(piece, 1);
  }
  __device__ __forceinline__ int tiles(int, int count) const { return count; }

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
        store_output_row<kConsumer>(params.out.at(piece.i, piece.s, exists ? head : 0), exists, r,
                                    output_factor(state.sum[r], state.reference[r], sink), lane, o);
      } else {
        const std::uint32_t part = piece.partial * kHeads + row;
        const float factor = factor_to_f16<kShort>(o, r);
        PartialSums& sums = params.partial_sums[part];
        if (tells) sums.reference = state.reference[r], sums.sum = state.sum[r];
        if (first) sums.power[is_first ? 0 : 1] = inverse_power(factor);
        store_output_row<kConsumer, pack_f16, true, kShort>(
            params.partial_out + part * kPartialRowBytes, exists, r, factor, lane, o);
      }
    }
  }
};

// --- kernels ------------------------------------------------------------------------------------

template <CacheFormat kFormat, int kDim, bool kShort>
__global__ void __launch_bounds__(kBlockThreads<kFormat>, 1)
    decode_kernel(const __grid_constant__ KernelParams params) {
  const std::uint32_t smem = shared_address(dynamic_shared<1024>());
  constexpr bool kCopied = kFormat == CacheFormat::bf16;
  // The merge is not let in early, by allow_next_kernel(): its blocks would gather on what few
  // multiprocessors are free, which costs more than it saves.
  if (threadIdx.x == 0) {
    init_barriers<Plan<kDim>>(smem, [](int, int group) {
      return kCopied ? copied_group_arrivals(group) : kTurnedGroupArrivals;
    });
    if (!kCopied) init_landed_barriers<kDim>(smem);
    fence_mbarrier_init();
  }
  const Pieces pieces(params, smem + Plan<kDim>::kBytes);
  pieces.fill(params);
  __syncthreads();  // the barriers and the table are there

  // Each role is one branch, as setmaxnreg wants it.
  const Work<kFormat, kShort> work{params, pieces};
  const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
  if (kShort && warpgroup < 2) {
    setmaxnreg_inc<kMultiplyRegisters<kFormat>>();
    consumer_role<Plan<kDim>, kEither>(work, params.scale, smem);
  } else if (!kShort && warpgroup == 0) {
    setmaxnreg_inc<kMultiplyRegisters<kFormat>>();
    consumer_role<Plan<kDim>, 0>(work, params.scale, smem);
  } else if (!kShort && warpgroup == 1) {
    setmaxnreg_inc<kMultiplyRegisters<kFormat>>();
    consumer_role<Plan<kDim>, 1>(work, params.scale, smem);
  } else {
    setmaxnreg_dec<kBringRegisters<kFormat>>();
    const int thread = __shfl_sync(kFullWarp, threadIdx.x, 0) - 2 * 128;  // the warp's first one
    if (thread < kCopyThreads<kFormat>) {
      copy_role<kFormat, kDim>(params, pieces, smem);
    } else if constexpr (!kCopied) {
      turn_role<kFormat, kDim>(pieces, smem, (thread - kCopyThreads<kFormat>) / 32);
    }
  }
}

}  // namespace winnow::sparse_mla::decode_sm90_detail
