// What the kernel of topk_paged_cuda.cuh stores for scores_paged.
#pragma once

#include "winnow/indexer/topk_paged/topk_paged_cuda.cuh"

namespace winnow::indexer::cuda_detail {

struct PagedScores {
  float* scores;  // [b, s_q, columns]
  std::int64_t stride0, stride1;
  int columns;
  bool clean;    // -inf behind what a query sees
  bool aligned;  // every row to 16 bytes

  __device__ int tiles(int rows) const {
    return ceil_div(clean ? columns : min(rows, columns), kTileRows);
  }
  __device__ static int seen_of(const gpu::PageLine& line, const gpu::QueryGroup& group,
                                int query) {
    return gpu::rows_of_query(line, group.sequence, group.first + query);
  }
  __device__ __forceinline__ void store(int, const gpu::QueryGroup& group, int query, int row,
                                        const bool (&visible)[4], const float (&score)[4],
                                        int seen) const {
    const int end = clean ? columns : min(seen, columns);
    float* const out = scores + group.sequence * stride0 + (group.first + query) * stride1 + row;
    float value[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      value[e] = visible[e] && row + e < seen ? score[e] + 0.0f : negative_infinity();
    }
    if (aligned && row + 4 <= end) {
      *reinterpret_cast<float4*>(out) = make_float4(value[0], value[1], value[2], value[3]);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (row + e < end) out[e] = value[e];
      }
    }
  }
};

}  // namespace winnow::indexer::cuda_detail
