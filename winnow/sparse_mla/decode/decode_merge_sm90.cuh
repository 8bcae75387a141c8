// Decode, sm90: the kernels that add up the parts of queries.
//
// The order of a sum depends on the kernel and the number of parts, and the kernel on the most
// parts of a query: with batch_invariant on the number of entries alone.
#pragma once

#include <cstdint>

#include "winnow/device/common/launch.cuh"
#include "winnow/sparse_mla/decode/decode_sm90.cuh"

namespace winnow::sparse_mla::decode_sm90_detail {

inline constexpr int kMergeThreads = 256;
inline constexpr int kMergeQuarters = 4;          // of the threads, which take parts in turn
inline constexpr std::uint32_t kMergeParts = 16;  // whose rows are under way at once

// The partials of a query: those of `count` groups from `first` on. `second`: the first of them is
// the second one of its group.
struct Parts {
  std::uint32_t query, first, count;
  bool second;
};
// The parts of the `number`th query that is merged.
__device__ __forceinline__ Parts parts_of(const KernelParams& params, std::uint32_t number) {
  const std::uint32_t begin = number * params.query_tiles, last = begin + params.query_tiles - 1;
  const std::uint32_t first = begin / params.cut_tiles;
  return {params.cut_query + number, first, last / params.cut_tiles - first + 1,
          first * params.cut_tiles / params.query_tiles < number};
}

// Where the row of a head of a block of heads is in partial n of `parts`.
__device__ __forceinline__ std::int64_t row_of_partial(const KernelParams& params,
                                                       const Parts& parts, std::uint32_t n,
                                                       std::uint32_t head_block,
                                                       std::uint32_t head) {
  return std::int64_t{partial_of(params, parts.first + n, n == 0 && parts.second, head_block)} *
             kHeads +
         head % kHeads;
}

// Adds up the partials of one query and head in each block; blocks count heads first.
__global__ void __launch_bounds__(kMergeThreads)
    merge_kernel(const __grid_constant__ KernelParams params) {
  const auto heads = static_cast<std::uint32_t>(params.h_q);
  const std::uint32_t head = blockIdx.x % heads, head_block = head / kHeads;
  const Parts parts = parts_of(params, blockIdx.x / heads);
  const std::uint32_t i = parts.query / params.s_q, s = parts.query % params.s_q;
  wait_for_kernel_before();
  if (parts.count == 1) return;  // a whole query
  const auto row_of = [&](std::uint32_t n) {
    return row_of_partial(params, parts, n, head_block, head);
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
      // 0 past the last part.
      const float weight =
          __shfl_sync(kFullWarp, scaled, static_cast<int>(quarter + kMergeQuarters * k));
      add_partial(all, rows[k], weight);
    }
  }
  staged[quarter][0][eighth] = make_float4(all[0], all[1], all[2], all[3]);
  staged[quarter][1][eighth] = make_float4(all[4], all[5], all[6], all[7]);
  __syncthreads();
  if (threadIdx.x >= 128) return;
  // Four columns a thread, two of them behind each other.
  float4 total = staged[0][threadIdx.x % 2][threadIdx.x / 2];
#pragma unroll
  for (int n = 1; n < kMergeQuarters; ++n) {
    const float4 other = staged[n][threadIdx.x % 2][threadIdx.x / 2];
    total = make_float4(total.x + other.x, total.y + other.y, total.z + other.z, total.w + other.w);
  }
  const int at = static_cast<int>(head);
  const float factor = output_factor(sum, reference, sink_of(params, at));
  const std::uint32_t column =
      params.partials_in_pairs
          ? 32 * (threadIdx.x / 8) + 16 * (threadIdx.x % 2) + threadIdx.x % 8 / 2 * 2
          : 4 * threadIdx.x;
  const auto store = [&](std::uint32_t first, float a, float b) {
    *reinterpret_cast<std::uint32_t*>(params.out.at(i, s, at) + 2 * first) =
        pack_bf16(a * factor, b * factor);
  };
  store(column, total.x, total.y);
  store(column + (params.partials_in_pairs ? 8 : 2), total.z, total.w);
  if (threadIdx.x == 0) store_lse(params, i, s, at, reference, sum);
}

// --- few parts ----------------------------------------------------------------------------------

static_assert(kFewParts == kMergeQuarters);
inline constexpr std::uint32_t kFewHeadsAtOnce = 2;                               // of a thread
inline constexpr std::uint32_t kFewHeads = kMergeThreads / 64 * kFewHeadsAtOnce;  // of a block

// The same for queries with up to kFewParts parts, for which a block with one head would begin,
// wait for memory once and end. A block has kFewHeads heads of a query; blocks count heads first.
__global__ void __launch_bounds__(kMergeThreads)
    merge_few_kernel(const __grid_constant__ KernelParams params) {
  const auto heads = static_cast<std::uint32_t>(params.h_q);
  const std::uint32_t blocks = ceil_div(heads, kFewHeads);  // of a query
  const std::uint32_t first_head = blockIdx.x % blocks * kFewHeads,
                      head_block = first_head / kHeads;
  const Parts parts = parts_of(params, blockIdx.x / blocks);
  const std::uint32_t i = parts.query / params.s_q, s = parts.query % params.s_q;
  wait_for_kernel_before();
  if (parts.count == 1) return;  // a whole query
  const auto row_of = [&](std::uint32_t n, std::uint32_t head) {
    return row_of_partial(params, parts, n, head_block, head);
  };
  // A thread has eight columns of its heads; the first warp of two those of the first consumer.
  const std::uint32_t lane = threadIdx.x % 32, eighth = threadIdx.x % 64;
  const auto head_of = [&](std::uint32_t k) {
    return first_head + threadIdx.x / 64 + kMergeThreads / 64 * k;
  };
  // Four lanes read the sums of a head's parts. All rows are asked for before these are needed.
  PartialSums sums{kNoReference, 0, {0, 0}};
  const std::uint32_t head_of_lane = head_of(lane / kFewParts % kFewHeadsAtOnce);
  if (lane % kFewParts < parts.count && head_of_lane < heads) {
    sums = params.partial_sums[row_of(lane % kFewParts, head_of_lane)];
  }
  uint4 rows[kFewHeadsAtOnce][kFewParts];
#pragma unroll
  for (std::uint32_t k = 0; k < kFewHeadsAtOnce; ++k) {
#pragma unroll
    for (std::uint32_t n = 0; n < kFewParts; ++n) {
      rows[k][n] = make_uint4(0, 0, 0, 0);
      if (n < parts.count && head_of(k) < heads) {
        rows[k][n] = *reinterpret_cast<const uint4*>(
            params.partial_out + row_of(n, head_of(k)) * kPartialRowBytes + 16 * eighth);
      }
    }
  }
  const float its_reference = fmaxf(kNoReference, quad_max(sums.reference));
  const float mine = ex2(sums.reference - its_reference);
  // Blocks that merge their own parts form the same products: each is rounded by itself.
  const float its_sum = quad_sum(__fmul_rn(sums.sum, mine));
  const float scaled = __fmul_rn(mine, eighth < 32 ? sums.power[0] : sums.power[1]);
#pragma unroll
  for (std::uint32_t k = 0; k < kFewHeadsAtOnce; ++k) {
    const auto of_lane = [&](float value, std::uint32_t n) {
      return __shfl_sync(kFullWarp, value, static_cast<int>(kFewParts * k + n));
    };
    const float reference = of_lane(its_reference, 0), sum = of_lane(its_sum, 0);
    float total[8] = {};
#pragma unroll
    for (std::uint32_t n = 0; n < kFewParts; ++n) {
      const float weight = of_lane(scaled, n);  // 0 past the last part
      add_partial(total, rows[k][n], weight);
    }
    if (head_of(k) >= heads) return;
    const int head = static_cast<int>(head_of(k));
    const float factor = output_factor(sum, reference, sink_of(params, head));
    std::uint32_t out[4];
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      out[word] = pack_bf16(total[2 * word] * factor, total[2 * word + 1] * factor);
    }
    if (params.partials_in_pairs) quad_transpose(out, static_cast<int>(lane));
    *reinterpret_cast<uint4*>(params.out.at(i, s, head) + 16 * eighth) =
        make_uint4(out[0], out[1], out[2], out[3]);
    if (eighth == 0) store_lse(params, i, s, head, reference, sum);
  }
}

}  // namespace winnow::sparse_mla::decode_sm90_detail
