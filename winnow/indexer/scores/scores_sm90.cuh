// Dense scores, sm90: the sink of score_tiles_sm90.cuh that stores them.
#pragma once

#include "winnow/indexer/score_tiles_sm90.cuh"

namespace winnow::indexer::sm90_detail {

struct DenseKernelParams {
  float* scores;  // [s_q, s_k]
  std::int64_t stride;
};

struct DenseSink {
  using Params = DenseKernelParams;
  static constexpr bool kWholeRows = true;
  static constexpr int kSinkBytes = 0;

  template <class Shape, class Plan>
  __device__ static void run(const ScoreParams& p, const Params& dense, const Shared<Plan>& shared,
                             int warp) {
    const int lane = threadIdx.x % 32;
    device::PipelineState<Plan::kScoreStages> ring;
    Schedule<Shape, true> schedule(p);
    Item item;
    while (schedule.next(item)) {
      for (int tile = 0; tile < item.tiles; ++tile) {
        device::mbarrier_wait(shared.ready(ring.stage), ring.parity, "store", ring.stage);
        for (int local = warp; local < Shape::kQueries; local += kSinkWarps) {
          const int query = item.first_query + local;
          if (query >= p.s_q) break;
          const RowRange visible = visible_rows(p, query);
#pragma unroll
          for (int i = lane; i < kTileRows; i += 32) {
            const int row = item.begin + tile * kTileRows + i;
            if (row >= p.s_k) continue;
            const bool present = row >= visible.begin && row < visible.end;
            dense.scores[query * dense.stride + row] =
                present ? read_score<Shape>(shared, ring.stage, local, i) + 0.0f
                        : device::negative_infinity();
          }
        }
        device::mbarrier_arrive_warp(shared.free(ring.stage));
        ring.advance();
      }
    }
  }
};

template <class Shape>
__global__ void __launch_bounds__(kThreads, 1)
    dense_kernel(const __grid_constant__ ScoreParams p, const DenseKernelParams dense) {
  run_roles<DenseSink, Shape>(p, dense);
}

}  // namespace winnow::indexer::sm90_detail
