// Dense scores and scores at given rows, for GPUs of compute capability 8.0 and newer: the classes
// that tell score_tiles_cuda.cuh what to score, and store the scores. A block has one item: some
// queries and a part of the rows they see, or a query and a part of its entries.
#pragma once

#include <cstdint>

#include "winnow/indexer/chosen.cuh"
#include "winnow/indexer/score_tiles_cuda.cuh"
#include "winnow/indexer/seen_rows.cuh"

namespace winnow::indexer::cuda_detail {

struct DenseParams {
  gpu::SeenRows seen;
  HeadsView heads;  // from query 0 on
  Columns columns;
  const char* k;
  std::int64_t k_row_stride;  // bytes
  const float* k_scale;       // with f8_e4m3
  std::int64_t k_scale_stride;
  float* scores;  // [s_q, s_k], or [s_q, width] from each query's first row on
  std::int64_t stride;
  bool aligned;  // every row of scores begins at a multiple of 16 bytes
  bool clean;    // rows that no query of an item sees get scores, too: -inf
  int groups;    // of columns.queries queries
  int splits;    // items that a group is cut into
};

// kFromStart: as visible_rows() takes it.
template <DType kDType, bool kFromStart>
class DenseWork {
 public:
  // The items of later queries, which see the most, come first.
  __device__ explicit DenseWork(const DenseParams& p) : p_(p) {
    const int number = static_cast<int>(blockIdx.x);
    first_query_ = (p.groups - 1 - number / p.splits) * p.columns.queries;
    const gpu::SeenRange rows =
        gpu::scored_rows<kFromStart>(p.seen, first_query_, p.columns.queries, kTileRows);
    const int all = static_cast<int>((rows.end - rows.begin) / kTileRows);
    const TileRange tiles = split_tiles(all, number % p.splits, p.splits);
    begin_ = static_cast<int>(rows.begin) + tiles.first * kTileRows;
    tiles_ = tiles.end - tiles.first;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int query = own_query(i);
      seen_[i] = {0, 0};
      if (query >= p.seen.s_q) continue;
      if constexpr (kFromStart) start_[i] = gpu::first_row(p.seen, query);
      seen_[i] = gpu::visible_rows<kFromStart>(p.seen, query);
      if (!p.clean) continue;
      float* const scores = p.scores + query * p.stride;
      if constexpr (kFromStart) {
        gpu::store_unseen_from(p.seen, start_[i], rows, scores, p.aligned, number % p.splits,
                               p.splits);
      } else {
        gpu::store_unseen(p.seen, rows, scores, p.aligned, number % p.splits, p.splits);
      }
    }
  }

  __device__ int tiles() const { return tiles_; }
  __device__ HeadsView heads() const {
    HeadsView view = from_query(p_.heads, first_query_);
    view.queries = min(p_.columns.queries, p_.seen.s_q - first_query_);
    return view;
  }
  __device__ void prepare(int tile, int, int) { row_ = begin_ + tile * kTileRows; }
  __device__ const char* row(int local) const {
    const std::int64_t row = row_ + local;
    return row < p_.seen.s_k ? p_.k + row * p_.k_row_stride : nullptr;
  }

  __device__ __forceinline__ void store(int tile, const TileSums& sums, int warp, int lane) const {
    const int row = begin_ + tile * kTileRows + 4 * lane;
    float scale[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    if constexpr (kDType == DType::f8_e4m3) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (row + e < p_.seen.s_k) scale[e] = __ldg(p_.k_scale + (row + e) * p_.k_scale_stride);
      }
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int local = warp + i * kWarps, query = first_query_ + local;
      if (local >= p_.columns.queries || query >= p_.seen.s_q) continue;
      float score[4];
      sums.load(local, lane, score);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool seen = row + e >= seen_[i].begin && row + e < seen_[i].end;
        score[e] = seen ? score[e] * scale[e] + 0.0f : negative_infinity();
      }
      if constexpr (kFromStart) {
        store_from_start(query, std::int64_t{row} - start_[i], score);
        continue;
      }
      float* const place = p_.scores + query * p_.stride + row;
      if (p_.aligned && row + 4 <= p_.seen.s_k) {
        *reinterpret_cast<float4*>(place) = make_float4(score[0], score[1], score[2], score[3]);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (row + e < p_.seen.s_k) place[e] = score[e];
        }
      }
    }
  }

 private:
  static constexpr int kOwn = kParts / kWarps;  // queries of a warp at most, for store()
  __device__ int own_query(int i) const {
    const int local = static_cast<int>(threadIdx.x / 32) + i * kWarps;
    return local < p_.columns.queries ? first_query_ + local : p_.seen.s_q;
  }
  // Four scores from a column on, of which some may be none.
  __device__ __forceinline__ void store_from_start(int query, std::int64_t column,
                                                   const float (&score)[4]) const {
    float* const scores = p_.scores + query * p_.stride;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (column + e >= 0 && column + e < p_.seen.width) scores[column + e] = score[e];
    }
  }

  const DenseParams& p_;
  int first_query_, begin_, tiles_, row_;
  gpu::RowRange seen_[kOwn];
  int start_[kOwn];  // with kFromStart
};

template <DType kDType, bool kFromStart>
__global__ void __launch_bounds__(kThreads, 1) dense_kernel(const __grid_constant__ DenseParams p) {
  DenseWork<kDType, kFromStart> work(p);
  if (work.tiles() > 0) score_tiles<kDType>(plan(), p.columns, work);
}

// ---- At given rows -----------------------------------------------------------------------------

struct AtParams {
  gpu::View view;
  Columns columns;  // of one query
  float* scores;    // [s_q, columns]
  std::int64_t scores_stride;
  int splits;  // items that a query is cut into
};

template <DType kDType>
class AtWork {
 public:
  __device__ explicit AtWork(const AtParams& p) : p_(p) {
    entries_ = gpu::entries_of(p.view, static_cast<int>(blockIdx.x) / p.splits);
    const TileRange tiles = split_tiles(ceil_div(p.view.columns, kTileRows),
                                        static_cast<int>(blockIdx.x) % p.splits, p.splits);
    first_ = tiles.first;
    tiles_ = tiles.end - tiles.first;
    next_ = load(0, static_cast<int>(threadIdx.x / 32), static_cast<int>(threadIdx.x % 32));
  }

  __device__ int tiles() const { return tiles_; }
  __device__ HeadsView heads() const {
    const gpu::View& view = p_.view;
    return from_query(
        {view.q, view.q_stride0, view.q_stride1, view.weights, view.weights_stride, 1, view.h,
         view.row_bytes / (kDType == DType::f8_e4m3 ? 1 : 2), view.weights_are_bf16},
        entries_.query);
  }
  // A lane's index of the next tile is loaded during this one.
  __device__ void prepare(int tile, int warp, int lane) {
    chosen_ = entries_.row(next_);
    next_ = load(tile + 1, warp, lane);
  }
  __device__ const char* row(int local) const {
    const std::int64_t row = __shfl_sync(kFullWarp, chosen_, local % kWarpRows);
    return row < 0 ? nullptr : p_.view.k + row * p_.view.k_row_stride;
  }

  __device__ __forceinline__ void store(int tile, const TileSums& sums, int warp, int lane) const {
    if (warp != tile % kWarps) return;
    float score[4];
    sums.load(0, lane, score);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int entry = (first_ + tile) * kTileRows + 4 * lane + e;
      if (entry >= p_.view.columns) continue;
      const int row = entries_.row(gpu::index_of_entry(p_.view, entries_, entry));
      if constexpr (kDType == DType::f8_e4m3) {
        if (row >= 0) score[e] *= gpu::scale_of(p_.view, row);
      }
      p_.scores[entries_.query * p_.scores_stride + entry] =
          row >= 0 ? score[e] + 0.0f : negative_infinity();
    }
  }

 private:
  __device__ int load(int tile, int warp, int lane) const {
    if (lane >= kWarpRows || tile >= tiles_) return -1;
    return gpu::index_of_entry(p_.view, entries_,
                               (first_ + tile) * kTileRows + kWarpRows * warp + lane);
  }

  const AtParams& p_;
  gpu::Entries entries_;
  int first_, tiles_, chosen_, next_;
};

template <DType kDType>
__global__ void __launch_bounds__(kThreads, 1)
    scores_at_kernel(const __grid_constant__ AtParams p) {
  AtWork<kDType> work(p);
  if (work.tiles() > 0) score_tiles<kDType>(plan(), p.columns, work);
}

}  // namespace winnow::indexer::cuda_detail
