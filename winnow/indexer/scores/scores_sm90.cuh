// Dense scores, sm90: the sink of score_tiles_sm90.cuh that stores them.
#pragma once

#include "winnow/device/common/launch.cuh"
#include "winnow/indexer/score_tiles_sm90.cuh"

namespace winnow::indexer::sm90_detail {

// A shape of which the scores of each query begin with its first row.
template <class Of>
struct FromStart : Of {
  static constexpr bool kFromStart = true;
};

struct DenseKernelParams {
  float* scores;  // [s_q, s_k], or [s_q, width] from each query's first row on
  std::int64_t stride;
  bool aligned;  // every row to 16 bytes
  bool clean;    // scores of rows that nobody sees are -inf
};

struct DenseSink {
  using Params = DenseKernelParams;
  struct Memory {};

  template <class Shape, class Plan>
  __device__ static void run(const ScoreParams& p, const Params& dense, Plan shared, int warp) {
    constexpr int kOwn = (Shape::kQueries + kSinkWarps - 1) / kSinkWarps;  // queries of this warp
    device::PipelineState<Plan::kScoreStages> ring;
    Schedule<Shape> schedule(p);
    Item item;
    RowRange visible[kOwn];
    int start[kOwn];  // with kFromStart
    while (schedule.next(item)) {
#pragma unroll
      for (int own = 0; own < kOwn; ++own) {
        const int query = item.first_query + warp + own * kSinkWarps;
        if constexpr (Shape::kFromStart) start[own] = query < p.s_q ? first_row(p, query) : 0;
        visible[own] = query < p.s_q ? visible_rows<Shape::kFromStart>(p, query) : RowRange{0, 0};
      }
      if (dense.clean) {
        const SeenRange scored =
            scored_rows<Shape::kFromStart>(p, item.first_query, Shape::kQueries, kTileRows);
        for (int local = warp; local < Shape::kQueries; local += kSinkWarps) {
          const int query = item.first_query + local;
          if (query >= p.s_q) break;
          float* const scores = dense.scores + query * dense.stride;
          if constexpr (Shape::kFromStart) {
            store_unseen_from(p, first_row(p, query), scored, scores, dense.aligned, item.split,
                              p.splits);
          } else {
            store_unseen(p, scored, scores, dense.aligned, item.split, p.splits);
          }
        }
      }
      for (int tile = 0; tile < item.tiles; ++tile) {
        shared.ready()[ring.stage].wait(ring.parity, "store", ring.stage);
        const int first = item.begin + tile * kTileRows;
        const int row = first + 4 * static_cast<int>(threadIdx.x % 32);
#pragma unroll
        for (int own = 0; own < kOwn; ++own) {
          const int local = warp + own * kSinkWarps, query = item.first_query + local;
          if (local >= Shape::kQueries || query >= p.s_q) continue;
          if constexpr (Shape::kFromStart) {
            float* const scores = dense.scores + query * dense.stride;
            store_from_start<Shape>(p, shared, ring.stage, local, first, visible[own], start[own],
                                    scores);
            continue;
          }
          float score[4];
          read_scores<Shape>(shared, ring.stage, local, score);
          if (first < visible[own].begin || first + kTileRows > visible[own].end) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const bool seen = row + e >= visible[own].begin && row + e < visible[own].end;
              if (!seen) score[e] = device::negative_infinity();
            }
          }
          float* const place = dense.scores + query * dense.stride + row;
          if (dense.aligned && first + kTileRows <= p.s_k) {
            *reinterpret_cast<float4*>(place) = make_float4(score[0], score[1], score[2], score[3]);
          } else {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              if (row + e < p.s_k) place[e] = score[e];
            }
          }
        }
        shared.free()[ring.stage].arrive_warp();
        ring.advance();
      }
    }
  }

 private:
  // A query's scores of a tile, in columns that begin with row `start`. Lanes store next to each
  // other, since a column of 4 rows is at no multiple of 16 bytes.
  template <class Shape, class Plan>
  __device__ __forceinline__ static void store_from_start(const ScoreParams& p, Plan shared,
                                                          int stage, int local, int first,
                                                          RowRange visible, int start,
                                                          float* scores) {
    float score[4];
    read_scores_apart<Shape>(shared, stage, local, score);
    const int lane = threadIdx.x % 32;
    const std::int64_t column = std::int64_t{first} - start;  // of the tile's first row
    const bool seen = first >= visible.begin && first + kTileRows <= visible.end;
    if (seen && column >= 0 && column + kTileRows <= p.width) {
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[column + 32 * e + lane] = score[e];
      return;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int local_row = 32 * e + lane, row = first + local_row;
      if (row < visible.begin || row >= visible.end) score[e] = device::negative_infinity();
      const std::int64_t place = column + local_row;
      if (place >= 0 && place < p.width) scores[place] = score[e];
    }
  }
};

// What comes next may wait for the scores beside the last blocks.
template <class Shape>
__global__ void __launch_bounds__(kThreads, 1)
    dense_kernel(const __grid_constant__ ScoreParams p, const DenseKernelParams dense) {
  device::allow_next_kernel();
  run_roles<DenseSink, Shape>(p, dense);
}

}  // namespace winnow::indexer::sm90_detail
