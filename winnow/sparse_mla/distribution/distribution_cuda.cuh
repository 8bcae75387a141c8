// The attention distribution, for GPUs of compute capability 8.0 and newer: the kernel.
// attn_sum[i,j] = sum over heads of exp(scale q_h.k_j - lse_h).
//
// A block has a query, and adds up its blocks of 64 heads one after the other, each over all tiles,
// so that no other block writes to the sums. The logits are those of logits_cuda.cuh. Two blocks
// share a multiprocessor that has the shared memory: while one sums exponentials the other
// multiplies.
#pragma once

#include <cstdint>

#include "winnow/sparse_mla/two_sources_cuda.cuh"

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

template <int kDim, int kParts>
struct DistributionMemory {
  Tile<kRows, kDim> rows[2];
  Partials partials[kWarps][kParts];
  float sums[kWarps][kRows];       // of a tile, over the heads of each warp
  std::int32_t entries[2][kRows];  // of the tile whose copies begin, and of the next one
  std::uint32_t masks[4];          // of tiles: which entries are visible
  std::int32_t bounds[8];          // of the query's entries
};
// kResident: blocks of a multiprocessor that registers suffice for.
template <DType kType, int kDim, int kParts, int kResident_>
struct DistributionPlan : Parts<kType, kDim, kParts>, Shared<DistributionMemory<kDim, kParts>> {
  using Memory = DistributionMemory<kDim, kParts>;
  WINNOW_PLACE(rows)
  WINNOW_PLACE(partials)
  WINNOW_PLACE(sums)
  WINNOW_PLACE(entries)
  WINNOW_PLACE(masks)
  WINNOW_PLACE(bounds)

  __device__ explicit DistributionPlan(std::uint32_t base) : Shared<Memory>{base} {}

  static constexpr int kResident = kResident_;
  static constexpr int kBytes = sizeof(Memory);
};

// The weights of a tile, summed over the warp's heads that exist. lse: of the lane's head, in
// base 2.
template <class P>
__device__ __forceinline__ void sum_heads(P shared, float scale, std::uint32_t mask, bool exists,
                                          float lse, int warp, int lane) {
  Logits x;
  take_logits<P::kParts>(shared.partials(), warp, lane, x);
  const std::uint32_t own = own_entries(mask, lane);
  const auto sums = shared.sums()[warp];
#pragma unroll
  for (int n = 0; n < kRows / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const bool counts = exists && sees(own, n, e);
      // Not a product: the logit of a head that does not exist is 0 * inf where a row holds an
      // infinity.
      float sum = counts ? ex2(fmaf(x[n][e], scale, -lse)) : 0.0f;
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) {  // lanes of the same entries
        sum += __shfl_xor_sync(kFullWarp, sum, distance);
      }
      if (lane < 4) sums[8 * n + 2 * lane + e].store(sum);
    }
  }
}

template <class P>
__global__ void __launch_bounds__(kThreads, P::kResident)
    distribution_kernel(const __grid_constant__ KernelParams params) {
  const P shared{shared_address(dynamic_shared<128>())};
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const std::int64_t query = blockIdx.x;
  float* const attn_sum = params.attn_sum.data + params.attn_sum.offset(query);
  for (int column = thread; column < params.columns; column += kThreads) attn_sum[column] = 0;

  if (warp == 0) find_bounds<kRows>(params.sources, query, lane, shared.bounds());
  __syncthreads();  // the bounds are there, and the zeros
  const CopiedTiles<kRows> entries(params.sources, shared.bounds());
  const int tiles = entries.tiles();

  // The first warp adds the sums of a tile while the others go on to the next one.
  const auto add = [&](int tile, int warp, int lane) {
    if (warp != 0) return;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += shared.sums()[w][lane].load();
    const int column = entries.column(tile, lane);
    if (column >= 0) attn_sum[column] += sum;
  };
  const auto start = [&](int tile, int warp, int lane) {
    return start_copy(shared, entries, tile, tiles, tile & 1, params.q, warp, lane);
  };
  for (int first = 0; first < params.h_q && tiles > 0; first += kHeads) {
    bring_first_entries(shared, entries, warp, lane);
    copy_all(start(0, warp, lane));
    cp_async_commit();
    const int heads = min(params.h_q - first, kHeads), row = 8 * warp + lane / 4;
    const bool exists = row < heads;
    const float lse =
        exists ? __ldg(params.lse.data + params.lse.offset(query) + first + row) * kLog2e : 0.0f;
    Queries<P> q;
    load_queries<P>(params.q + query * params.q_stride0 + first * params.q_stride1,
                    params.q_stride1, heads, warp, lane, q);
    for (int tile = 0; tile < tiles; ++tile) {
      const ThreadPlace at = thread_anew<P>(thread);
      const int warp = at.warp, lane = at.lane;
      cp_async_wait<0>();  // the thread's copies are there
      __syncthreads();     // the tile is there, and the one before is done with
      if (tile > 0) add(tile - 1, warp, lane);
      give_logits<P>(shared, tile & 1, shared.partials(), warp, lane, q,
                     start(tile + 1, warp, lane));
      cp_async_commit();  // of the next tile
      __syncthreads();    // the logits are there
      sum_heads(shared, params.scale, shared.masks()[tile & 3].load(), exists, lse, warp, lane);
    }
    cp_async_wait<0>();  // the zeros behind the last tile
    __syncthreads();     // the sums of the last tile are there
    add(tiles - 1, warp, lane);
  }
}

}  // namespace winnow::sparse_mla::distribution_cuda_detail
