// The attention distribution, for GPUs of compute capability 8.0 and newer: the kernel.
// attn_sum[i,j] = sum over heads of exp(scale q_h.k_j - lse_h).
//
// A block has a query, and adds up its blocks of 64 heads one after the other, each over all tiles,
// so that no other block writes to the sums. The logits are those of attention_cuda.cuh.
#pragma once

#include <cstdint>

#include "winnow/sparse_mla/attention_cuda.cuh"
#include "winnow/sparse_mla/two_sources.cuh"

namespace winnow::sparse_mla::distribution_cuda_detail {

using namespace winnow::sparse_mla::attention_cuda;

struct KernelParams {
  TwoSources sources;  // of which the second is absent
  const char* q;
  std::int64_t q_stride0, q_stride1;  // bytes
  Rows<const float*> lse;
  Rows<float*> attn_sum;
  float scale;  // of logits in base 2
  int h_q, columns;
};

template <class Attention>
struct DistributionMemory {
  typename Attention::Memory attention;
  float sums[kWarps][kRows];  // of a tile, over the heads of each warp
};
template <class Attention>
struct DistributionShared : Shared<DistributionMemory<Attention>> {
  using Memory = DistributionMemory<Attention>;
  WINNOW_PLACE(attention)
  WINNOW_PLACE(sums)
};

// The weights of a tile, summed over the warp's heads that exist. lse: of the lane's row, in
// base 2.
template <class P>
__device__ __forceinline__ void sum_heads(P shared, Place<float[kRows]> sums, float scale,
                                          std::uint32_t mask, bool exists, float lse, int warp,
                                          int lane) {
  float x[2][4];
  load_logits(shared, warp, lane, x);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const bool counts = exists && sees(mask, lane, i, e);
      // Not a product: the logit of a head that does not exist is 0 * inf where a row holds an
      // infinity.
      x[i][e] = counts ? ex2(fmaf(x[i][e], scale, -lse)) : 0.0f;
      x[i][e] += __shfl_xor_sync(kFullWarp, x[i][e], 8);
      x[i][e] += __shfl_xor_sync(kFullWarp, x[i][e], 16);
    }
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {  // rows that are neighbours have their units the other way round
    const float first = __shfl_xor_sync(kFullWarp, x[1][e], 4);
    const float second = __shfl_xor_sync(kFullWarp, x[0][e], 4);
    x[0][e] += first;
    x[1][e] += second;
  }
  if (lane >= 4) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[4 * logit_unit(lane, i) + e].store(x[i][e]);
  }
}

template <class P>
__global__ void __launch_bounds__(kThreads, 1)
    distribution_kernel(const __grid_constant__ KernelParams params) {
  const DistributionShared<P> memory{shared_address(dynamic_shared<128>())};
  const P shared{memory.attention().address};
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const std::int64_t query = blockIdx.x;
  float* const attn_sum = params.attn_sum.data + params.attn_sum.offset(query);
  for (int column = thread; column < params.columns; column += kThreads) attn_sum[column] = 0;

  if (thread < 4) shared.limits()[lane].store(load_limits(params.sources, query, lane));
  __syncthreads();  // the limits are there, and the zeros
  const QueryTiles<kRows> entries(params.sources, query, shared.limits()[lane & 3].load());
  const int tiles = entries.tiles();

  // The first warp adds the sums of a tile while the others go on to the next one.
  const auto add = [&](int tile) {
    if (warp != 0) return;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += memory.sums()[w][lane].load();
    const int column = entries.column(tile, lane);
    if (column >= 0) attn_sum[column] += sum;
  };
  std::int32_t entry;
  const auto copy = [&](int tile) {
    const std::uint32_t mask =
        __ballot_sync(kFullWarp, static_cast<std::uint32_t>(entry) < entries.visible(tile));
    const GatherView& rows = entries.rows(tile);
    copy_rows<P>(shared.rows()[tile & 1], entry, mask, warp, lane, policy_evict_last(),
                 [&](std::int64_t row) { return rows.kv + row * rows.kv_stride; });
    cp_async_commit();
    entry = entries.load(tile + 1, lane);
    return mask;
  };
  for (int first = 0; first < params.h_q && tiles > 0; first += kHeads) {
    entry = entries.load(0, lane);
    std::uint32_t next_mask = copy(0);
    const int heads = min(params.h_q - first, kHeads), row = 8 * warp + lane / 4;
    const bool exists = row < heads;
    const float lse =
        exists ? __ldg(params.lse.data + params.lse.offset(query) + first + row) * kLog2e : 0.0f;
    Queries<P> q;
    load_queries<P>(params.q + query * params.q_stride0 + first * params.q_stride1,
                    params.q_stride1, heads, warp, lane, q);
    for (int tile = 0; tile < tiles; ++tile) {
      const std::uint32_t mask = next_mask;
      cp_async_wait<0>();
      __syncthreads();  // the tile is there, and the one before is done with
      if (tile + 1 < tiles) next_mask = copy(tile + 1);
      if (tile > 0) add(tile - 1);
      multiply_scores(shared, tile & 1, warp, lane, q);
      __syncthreads();  // the logits are there
      sum_heads(shared, memory.sums()[warp], params.scale, mask, exists, lse, warp, lane);
    }
    __syncthreads();  // the sums of the last tile are there
    add(tiles - 1);
  }
}

}  // namespace winnow::sparse_mla::distribution_cuda_detail
