// Decode, sm90: the kernels.
//
// A block takes its pieces (decode_pieces_sm90.cuh) in turn. The consumers are those of
// attention_sm90.cuh; the others bring the rows (decode_rows_sm90.cuh, decode_turn_sm90.cuh).
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
  if (params.lse.data == nullptr) return;
  // log2(0) is -inf.
  *reinterpret_cast<float*>(params.lse.at(i, s, head)) = (reference + log2f(sum)) * kLn2;
}

// What a thread's row r of the consumer's half is multiplied by to become f16: the power of two
// that brings its largest finite value to 2^14 or more, below 2^15.
__device__ __forceinline__ float factor_to_f16(const Output& o, int r) {
  float largest = 0;
#pragma unroll
  for (int piece = 0; piece < 2; ++piece) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float x = fabsf(o[piece][4 * j + 2 * r + e]);
        largest = fmaxf(largest, x < infinity() ? x : 0.0f);
      }
    }
  }
  const std::uint32_t exponent = __float_as_uint(quad_max(largest)) >> 23;
  return __uint_as_float(min(268u - exponent, 253u) << 23);  // its inverse is no subnormal number
}
__device__ __forceinline__ float inverse_power(float power) {
  return __uint_as_float((254u << 23) - __float_as_uint(power));
}

// The pieces, as consumer_role() wants them.
template <CacheFormat kFormat>
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
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = 16 * warp + lane / 4 + 8 * r;
      const int head = piece.first_head + row;
      const bool exists = head < params.h_q;
      const bool first = exists && (lane & 3) == 0, tells = kConsumer == 0 && first;
      if (piece.partial < 0) {
        const float sink = exists ? sink_of(params, head) : negative_infinity();
        if (tells) store_lse(params, piece.i, piece.s, head, state.reference[r], state.sum[r]);
        store_output_row<kConsumer>(params.out.at(piece.i, piece.s, exists ? head : 0), exists, r,
                                    output_factor(state.sum[r], state.reference[r], sink), lane, o);
      } else {
        const std::uint32_t part = piece.partial * kHeads + row;
        const float factor = factor_to_f16(o, r);
        PartialSums& sums = params.partial_sums[part];
        if (tells) sums.reference = state.reference[r], sums.sum = state.sum[r];
        if (first) sums.power[kConsumer] = inverse_power(factor);
        store_output_row<kConsumer, pack_f16, true>(params.partial_out + part * kPartialRowBytes,
                                                    exists, r, factor, lane, o);
      }
    }
  }
};

// --- kernels ------------------------------------------------------------------------------------

template <CacheFormat kFormat, int kDim>
__global__ void __launch_bounds__(kBlockThreads<kFormat>, 1)
    decode_kernel(const __grid_constant__ KernelParams params) {
  const std::uint32_t smem = shared_address(dynamic_shared<1024>());
  constexpr bool kCopied = kFormat == CacheFormat::bf16;
  allow_next_kernel();  // that of the merge, which waits for this one
  if (threadIdx.x == 0) {
    init_barriers<kDim>(smem, [](int, int group) {
      return kCopied ? copied_group_arrivals(group) : kTurnedGroupArrivals;
    });
    if (!kCopied) init_landed_barriers<kDim>(smem);
    fence_mbarrier_init();
  }
  const Pieces pieces(params, smem + Plan<kDim>::kBytes);
  pieces.fill(params);
  __syncthreads();  // the barriers and the table are there

  // Each role is one branch, as setmaxnreg wants it.
  const Work<kFormat> work{params, pieces};
  const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    setmaxnreg_inc<kMultiplyRegisters<kFormat>>();
    consumer_role<kDim, 0>(work, params.scale, smem);
  } else if (warpgroup == 1) {
    setmaxnreg_inc<kMultiplyRegisters<kFormat>>();
    consumer_role<kDim, 1>(work, params.scale, smem);
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

inline constexpr int kMergeThreads = 256;
inline constexpr int kMergeQuarters = 4;          // of the threads, which take parts in turn
inline constexpr std::uint32_t kMergeParts = 16;  // whose rows are under way at once

// The partials of a query: `count` of them from `first` on, a group where queries are cut, or a
// segment. `second`: the first of them is the second one of its group.
struct Parts {
  std::uint32_t query, first, count;
  bool second;
};
// Of the `number`th query that is merged.
__device__ __forceinline__ Parts parts_of(const KernelParams& params, std::uint32_t number) {
  if (params.cut_tiles == 0) return {number, number * params.segments, params.segments, false};
  const std::uint32_t begin = number * params.query_tiles, last = begin + params.query_tiles - 1;
  const std::uint32_t first = begin / params.cut_tiles;
  return {params.cut_query + number, first, last / params.cut_tiles - first + 1,
          first * params.cut_tiles / params.query_tiles < number};
}

// Adds up the partials of a query and a head, a block for each, heads first.
__global__ void __launch_bounds__(kMergeThreads)
    merge_kernel(const __grid_constant__ KernelParams params) {
  const auto heads = static_cast<std::uint32_t>(params.h_q);
  const std::uint32_t head = blockIdx.x % heads, head_block = head / kHeads;
  const Parts parts = parts_of(params, blockIdx.x / heads);
  const std::uint32_t i = parts.query / params.s_q, s = parts.query % params.s_q;
  wait_for_kernel_before();
  if (parts.count == 1) return;  // a whole query
  const auto row_of = [&](std::uint32_t n) {
    return std::int64_t{partial_of(params, parts.first + n, n == 0 && parts.second, head_block)} *
               kHeads +
           head % kHeads;
  };
  WINNOW_BLOCK_SHARED(staged, float4[kMergeQuarters][2][64]);
  const std::uint32_t lane = threadIdx.x % 32;
  // A thread has eight columns; the first warp of two those of the first consumer.
  const std::uint32_t quarter = threadIdx.x / 64, eighth = threadIdx.x % 64;
  float reference = kNoReference, sum = 0;
  float all[8] = {};
  for (std::uint32_t begin = 0; begin < parts.count; begin += kMergeParts) {
    // A lane reads the sums of one part; all rows are asked for before the sums are needed.
    const std::uint32_t count = min(parts.count - begin, kMergeParts);
    PartialSums sums{kNoReference, 0, {0, 0}};
    if (lane < count) sums = params.partial_sums[row_of(begin + lane)];
    uint4 rows[kMergeParts / kMergeQuarters];
#pragma unroll
    for (std::uint32_t k = 0; k < kMergeParts / kMergeQuarters; ++k) {
      const std::uint32_t n = quarter + kMergeQuarters * k;
      rows[k] = make_uint4(0, 0, 0, 0);
      if (n < count) {
        rows[k] = *reinterpret_cast<const uint4*>(
            params.partial_out + row_of(begin + n) * kPartialRowBytes + 16 * eighth);
      }
    }
    const float raised = fmaxf(reference, warp_max(sums.reference));
    const float factor = ex2(reference - raised), mine = ex2(sums.reference - raised);
    reference = raised;
    sum = fmaf(sum, factor, warp_sum(sums.sum * mine));
    const float scaled = mine * (eighth < 32 ? sums.power[0] : sums.power[1]);
#pragma unroll
    for (float& value : all) value *= factor;
#pragma unroll
    for (std::uint32_t k = 0; k < kMergeParts / kMergeQuarters; ++k) {
      // 0 of parts that are none.
      const float weight =
          __shfl_sync(kFullWarp, scaled, static_cast<int>(quarter + kMergeQuarters * k));
      const std::uint32_t words[4] = {rows[k].x, rows[k].y, rows[k].z, rows[k].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack_f16(words[i]);
        all[2 * i] = fmaf(pair.x, weight, all[2 * i]);
        all[2 * i + 1] = fmaf(pair.y, weight, all[2 * i + 1]);
      }
    }
  }
  staged[quarter][0][eighth] = make_float4(all[0], all[1], all[2], all[3]);
  staged[quarter][1][eighth] = make_float4(all[4], all[5], all[6], all[7]);
  __syncthreads();
  if (threadIdx.x >= 128) return;
  // Four columns a thread.
  float4 total = staged[0][threadIdx.x % 2][threadIdx.x / 2];
#pragma unroll
  for (int n = 1; n < kMergeQuarters; ++n) {
    const float4 other = staged[n][threadIdx.x % 2][threadIdx.x / 2];
    total = make_float4(total.x + other.x, total.y + other.y, total.z + other.z, total.w + other.w);
  }
  const int at = static_cast<int>(head);
  const float factor = output_factor(sum, reference, sink_of(params, at));
  *reinterpret_cast<uint2*>(params.out.at(i, s, at) + 8 * threadIdx.x) = make_uint2(
      pack_bf16(total.x * factor, total.y * factor), pack_bf16(total.z * factor, total.w * factor));
  if (threadIdx.x == 0) store_lse(params, i, s, at, reference, sum);
}

}  // namespace winnow::sparse_mla::decode_sm90_detail
