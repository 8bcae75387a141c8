// Decode, sm90: the kernels.
//
// A block takes its pieces (decode_pieces_sm90.cuh) in turn. The consumers are those of
// attention_sm90.cuh; the third warpgroup brings the rows (decode_rows_sm90.cuh).
#pragma once

#include <cstdint>

#include "winnow/device/common/launch.cuh"
#include "winnow/sparse_mla/decode/decode_rows_sm90.cuh"
#include "winnow/sparse_mla/decode/decode_turn_sm90.cuh"

namespace winnow::sparse_mla::decode_sm90_detail {

// The warpgroups of a block: two consumers, one that copies, and for rows in f8 one that turns them
// into bf16.
template <CacheFormat kFormat>
inline constexpr int kBlockThreads = kFormat == CacheFormat::bf16 ? 384 : 512;

// Registers of a thread. An increase waits for what decreases give back: those of all warpgroups
// must not exceed what they begin with, 168 each of three, or 128 each of four.
template <CacheFormat kFormat>
inline constexpr int kMultiplyRegisters = kFormat == CacheFormat::bf16 ? 200 : 192;
template <CacheFormat kFormat>
inline constexpr int kCopyRegisters = kFormat == CacheFormat::bf16 ? 104 : 64;
inline constexpr int kTurnRegisters = 64;

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

// The pieces, as consumer_role() wants them.
template <CacheFormat kFormat>
struct Work {
  static constexpr bool kParts = false;
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
      const bool tells = kConsumer == 0 && exists && (lane & 3) == 0;
      if (piece.partial < 0) {
        const float sink = exists ? sink_of(params, head) : negative_infinity();
        if (tells) store_lse(params, piece.i, piece.s, head, state.reference[r], state.sum[r]);
        store_output_row<kConsumer>(params.out.at(piece.i, piece.s, exists ? head : 0), exists, r,
                                    output_factor(state.sum[r], state.reference[r], sink), lane, o);
        continue;
      }
      const std::int64_t part = std::int64_t{piece.partial} * kHeads + row;
      if (tells) params.partial_sums[part] = make_float2(state.reference[r], state.sum[r]);
      float* const to =
          params.partial_out + part * kValueColumns + kConsumer * 256 + 2 * (lane & 3);
      if (!exists) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          *reinterpret_cast<float2*>(to + 128 * half + 8 * j) =
              make_float2(o[half][4 * j + 2 * r], o[half][4 * j + 2 * r + 1]);
        }
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
  __syncthreads();

  // Each role is one branch, as setmaxnreg wants it.
  const Work<kFormat> work{params, pieces};
  const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    setmaxnreg_inc<kMultiplyRegisters<kFormat>>();
    consumer_role<kDim, 0>(work, params.scale, smem);
  } else if (warpgroup == 1) {
    setmaxnreg_inc<kMultiplyRegisters<kFormat>>();
    consumer_role<kDim, 1>(work, params.scale, smem);
  } else if (kCopied || warpgroup == 2) {
    setmaxnreg_dec<kCopyRegisters<kFormat>>();
    copy_role<kFormat, kDim>(params, pieces, smem);
  } else {
    setmaxnreg_dec<kTurnRegisters>();
    if constexpr (!kCopied) TurnRole<kFormat, kDim>(pieces, smem).run();
  }
}

inline constexpr int kMergeThreads = 128;  // four columns each

// The partials of a query.
struct Parts {
  std::uint32_t first;  // the first of them: a group where groups cut, or a segment
  std::uint32_t count;
};
__device__ __forceinline__ Parts parts_of(const KernelParams& params, std::uint32_t query) {
  if (!params.cut_by_groups) return {query * params.segments, params.segments};
  // Groups that cut begin at multiples of their tiles.
  const std::uint32_t share = params.group_queries * params.query_tiles + params.group_units;
  const std::uint32_t begin = query * params.query_tiles, last = begin + params.query_tiles - 1;
  return {begin / share, last / share - begin / share + 1};
}

// The queries that blocks of the merge take: where there are fewer groups than queries, the one in
// which a group begins, once for each such query. Otherwise each. False: none.
__device__ __forceinline__ bool merged_query(const KernelParams& params, std::uint32_t number,
                                             std::uint32_t& query) {
  query = number;
  if (!params.cut_by_groups) return true;
  if (params.queries < params.groups) return parts_of(params, query).count > 1;
  const GroupBegin begin = group_begin(params, number + 1);
  query = begin.query;
  return begin.tile != 0 && parts_of(params, query).first == number;
}

// Adds up the partials of a query and a head, a block for each, heads first.
__global__ void __launch_bounds__(kMergeThreads)
    merge_kernel(const __grid_constant__ KernelParams params) {
  const auto heads = static_cast<std::uint32_t>(params.h_q);
  const std::uint32_t head = blockIdx.x % heads, head_block = head / kHeads;
  std::uint32_t query;
  const bool merged = merged_query(params, blockIdx.x / heads, query);
  const std::uint32_t i = query / params.s_q, s = query % params.s_q;
  const Parts parts = parts_of(params, query);
  // Groups that cut have the query as their first piece, but for one that begins before it.
  const bool later = params.cut_by_groups && group_begin(params, parts.first).query < query;
  wait_for_kernel_before();
  if (!merged) return;
  const auto row_of = [&](std::uint32_t n) {
    const std::uint32_t part = parts.first + n;
    return std::int64_t{partial_of(params, part, n > 0 || !later, part, head_block)} * kHeads +
           head % kHeads;
  };
  // A lane reads the sums of one part; the rows of the parts are asked for before they are needed.
  const std::uint32_t lane = threadIdx.x % 32;
  float reference = kNoReference;
  for (std::uint32_t n = lane; n < parts.count; n += 32) {
    reference = fmaxf(reference, params.partial_sums[row_of(n)].x);
  }
  reference = warp_max(reference);
  float sum = 0;
  float4 all = make_float4(0, 0, 0, 0);
  for (std::uint32_t begin = 0; begin < parts.count; begin += 32) {
    const std::uint32_t count = min(parts.count - begin, 32u);
    const float2 sums =
        lane < count ? params.partial_sums[row_of(begin + lane)] : make_float2(kNoReference, 0);
    const float mine = ex2(sums.x - reference);
    sum += warp_sum(sums.y * mine);
#pragma unroll 8
    for (std::uint32_t n = 0; n < count; ++n) {
      const float4 o = *reinterpret_cast<const float4*>(
          params.partial_out + row_of(begin + n) * kValueColumns + 4 * threadIdx.x);
      const float factor = __shfl_sync(kFullWarp, mine, static_cast<int>(n));
      all.x = fmaf(o.x, factor, all.x);
      all.y = fmaf(o.y, factor, all.y);
      all.z = fmaf(o.z, factor, all.z);
      all.w = fmaf(o.w, factor, all.w);
    }
  }
  const int at = static_cast<int>(head);
  const float factor = output_factor(sum, reference, sink_of(params, at));
  *reinterpret_cast<uint2*>(params.out.at(i, s, at) + 8 * threadIdx.x) = make_uint2(
      pack_bf16(all.x * factor, all.y * factor), pack_bf16(all.z * factor, all.w * factor));
  if (threadIdx.x == 0) store_lse(params, i, s, at, reference, sum);
}

}  // namespace winnow::sparse_mla::decode_sm90_detail
