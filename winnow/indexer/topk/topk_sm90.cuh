// The choice of the k best rows while their scores are formed, sm90, for more rows than
// choose_sm90.cuh takes: the sink of score_tiles_sm90.cuh that keeps candidates. With few queries
// the rows are cut into ranges, whose choices merge_sm90.cuh merges.
#pragma once

#include <cstdint>

#include "winnow/indexer/score_tiles_sm90.cuh"
#include "winnow/indexer/topk/select_sm90.cuh"

namespace winnow::indexer::sm90_detail {

struct TopkKernelParams {
  std::int32_t* indices;  // [s_q, topk]
  std::int32_t* length;   // [s_q]
  float* scores;          // [s_q, topk], or null
  std::int64_t indices_stride, length_stride, scores_stride;
  Candidate* candidates;  // `capacity` for each query of each block
  // With splits, the choice of every range of rows:
  Candidate* parts;          // [s_q, splits, kept]
  std::int32_t* part_count;  // [s_q, splits]
  int capacity, topk, later_ties, kept;
};

// Writes what is chosen for a query, and marks the rest of its row as absent.
__device__ __forceinline__ void write_choice(const TopkKernelParams& p, int query,
                                             Selection& selection, std::uint32_t* bins) {
  std::int32_t* const indices = p.indices + query * p.indices_stride;
  float* const scores = p.scores == nullptr ? nullptr : p.scores + query * p.scores_stride;
  const int length = selection.finish(bins, [&](bool chosen, int place, Candidate candidate) {
    if (chosen) indices[place] = candidate.row;
    if (chosen && scores != nullptr) scores[place] = score_of(candidate.key);
  });
  const int lane = threadIdx.x % 32;
  for (int i = p.topk - 1 - lane; i >= length; i -= 32) {  // a sum with topk may pass 2^31
    indices[i] = -1;
    if (scores != nullptr) scores[i] = device::negative_infinity();
  }
  if (lane == 0) p.length[query * p.length_stride] = length;
}

struct TopkSink {
  using Params = TopkKernelParams;
  struct Memory {
    alignas(16) std::uint32_t bins[kSinkWarps][Selection::kBinWords];
  };

  template <class Shape, class Plan>
  __device__ static void run(const ScoreParams& p, const Params& topk, Plan shared, int warp) {
    constexpr int kOwn = (Shape::kQueries + kSinkWarps - 1) / kSinkWarps;  // queries of this warp
    const int lane = threadIdx.x % 32;
    std::uint32_t* const bins = shared.memory->sink.bins[warp];
    device::PipelineState<Plan::kScoreStages> ring;
    Schedule<Shape> schedule(p);
    Item item;
    Selection selection[kOwn];
    RowRange visible[kOwn];
    while (schedule.next(item)) {
#pragma unroll
      for (int own = 0; own < kOwn; ++own) {
        const int local = warp + own * kSinkWarps, query = item.first_query + local;
        const std::int64_t buffer =
            (std::int64_t{blockIdx.x} * Shape::kQueries + local) * topk.capacity;
        selection[own].begin(topk.candidates + buffer, topk.capacity, topk.topk, topk.later_ties);
        visible[own] = {0, 0};
        if (local < Shape::kQueries && query < p.s_q) visible[own] = visible_rows(p, query);
      }
      for (int tile = 0; tile < item.tiles; ++tile) {
        shared.ready()[ring.stage].wait(ring.parity, "select", ring.stage);
        float scores[kOwn][4];
#pragma unroll
        for (int own = 0; own < kOwn; ++own) {
          const int local = min(warp + own * kSinkWarps, Shape::kQueries - 1);
          read_scores<Shape>(shared, ring.stage, local, scores[own]);
        }
        shared.free()[ring.stage].arrive_warp();
        ring.advance();
        const int first = item.begin + tile * kTileRows;
#pragma unroll
        for (int own = 0; own < kOwn; ++own) {
          selection[own].offer(scores[own], first, visible[own].begin, visible[own].end, bins);
        }
      }
#pragma unroll
      for (int own = 0; own < kOwn; ++own) {
        const int local = warp + own * kSinkWarps, query = item.first_query + local;
        if (local >= Shape::kQueries || query >= p.s_q) continue;
        if (p.splits == 1) {
          write_choice(topk, query, selection[own], bins);
        } else {
          const std::int64_t part = std::int64_t{query} * p.splits + item.split;
          Candidate* const chosen = topk.parts + part * topk.kept;
          const int count =
              selection[own].finish(bins, [&](bool stays, int place, Candidate candidate) {
                if (stays) chosen[place] = candidate;
              });
          if (lane == 0) topk.part_count[part] = count;
        }
      }
    }
  }
};

template <class Shape>
__global__ void __launch_bounds__(kThreads, 1)
    topk_kernel(const __grid_constant__ ScoreParams p, const TopkKernelParams topk) {
  run_roles<TopkSink, Shape>(p, topk);
}

}  // namespace winnow::indexer::sm90_detail
