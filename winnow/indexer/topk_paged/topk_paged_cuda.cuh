// The scores of rows of a paged cache of f8_e4m3 keys, for GPUs of compute capability 8.0 and
// newer: what score_tiles_cuda.cuh scores. A block has one item: a group of queries of a sequence,
// and a part of its tiles of two pages.
#pragma once

#include <cstdint>

#include "winnow/indexer/score_tiles_cuda.cuh"
#include "winnow/indexer/topk_paged/choose_paged.cuh"
#include "winnow/indexer/topk_paged/page_line.cuh"

namespace winnow::indexer::cuda_detail {

static_assert(gpu::kPagedTileRows == kTileRows);

// `Stored` is what a launch stores of the scores: PagedKeys, or PagedScores of
// scores_paged_cuda.cuh. It has
//   tiles(rows)                          of a group that sees so many rows, at least those
//   seen_of(line, group, query)          the rows that a query sees, where store() wants them
//   store(line, group, query, row, visible, score, seen)
//                                        takes four scores from `row` on, a multiple of 4
template <class Stored>
struct PagedParams {
  HeadsView heads;                          // of query 0 of sequence 0
  std::int64_t q_stride0, weights_stride0;  // of a sequence; bytes, elements
  Columns columns;
  const std::uint8_t* pages;
  std::int64_t page_stride;
  const std::int32_t* block_tables;  // [b, table]
  std::int64_t block_tables_stride;
  int num_pages;
  gpu::PageLine line;
  int splits;  // items of a group
  Stored stored;
};

// [group of the launch][queries][stride]: what is absent is marked so, and what no query of the
// group sees.
struct PagedKeys {
  std::uint32_t* keys;
  std::int64_t stride;  // a multiple of kTileRows
  int queries;          // of a group at most

  __device__ static int tiles(int rows) { return ceil_div(rows, kTileRows); }
  __device__ static int seen_of(const gpu::PageLine&, const gpu::QueryGroup&, int) { return 0; }
  __device__ __forceinline__ void store(int group, const gpu::QueryGroup&, int query, int row,
                                        const bool (&visible)[4], const float (&score)[4],
                                        int) const {
    std::uint32_t key[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) key[e] = gpu::stored_key(visible[e], score[e]);
    *reinterpret_cast<uint4*>(keys + (std::int64_t{group} * queries + query) * stride + row) =
        make_uint4(key[0], key[1], key[2], key[3]);
  }
};

template <class Stored>
class PagedWork {
 public:
  __device__ explicit PagedWork(const PagedParams<Stored>& p) : p_(p) {
    number_ = static_cast<int>(blockIdx.x) / p.splits;
    group_ = gpu::query_group(p.line, number_);
    rows_ = gpu::rows_of_group(p.line, group_, gpu::last_length(p.line, group_));
    const TileRange all =
        split_tiles(p.stored.tiles(rows_), static_cast<int>(blockIdx.x) % p.splits, p.splits);
    first_ = all.first;
    end_ = all.end;
    tiles_ = max(min(end_, ceil_div(rows_, kTileRows)) - first_, 0);
    table_ = p.block_tables + group_.sequence * p.block_tables_stride;
    next_ = load(0, static_cast<int>(threadIdx.x / 32));
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int query = static_cast<int>(threadIdx.x / 32) + i * kWarps;
      seen_[i] = query < group_.count ? p.stored.seen_of(p.line, group_, query) : 0;
    }
  }

  __device__ int tiles() const { return tiles_; }
  __device__ HeadsView heads() const {
    HeadsView view = from_query(p_.heads, group_.first);
    view.q += group_.sequence * p_.q_stride0;
    view.weights = static_cast<const char*>(view.weights) +
                   group_.sequence * p_.weights_stride0 * (view.weights_are_bf16 ? 2 : 4);
    view.queries = group_.count;
    return view;
  }
  // A warp's rows are of one page, which it looks up during the tile before.
  __device__ void prepare(int tile, int warp, int) {
    page_ = next_;
    next_ = load(tile + 1, warp);
  }
  __device__ const char* row(int local) const {
    if (page_ < 0) return nullptr;
    return reinterpret_cast<const char*>(p_.pages) + page_ * p_.page_stride +
           local % gpu::kPagedPageRows * p_.heads.d;
  }

  __device__ __forceinline__ void store(int tile, const TileSums& sums, int warp, int lane) const {
    const int row = (first_ + tile) * kTileRows + 4 * lane;
    const int page = look_up(row / gpu::kPagedPageRows);
    float4 scale = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (page >= 0) {
      const std::uint8_t* const scales =
          p_.pages + page * p_.page_stride + gpu::kPagedPageRows * p_.heads.d;
      scale = __ldg(reinterpret_cast<const float4*>(scales) + row % gpu::kPagedPageRows / 4);
    }
    const float scales[4] = {scale.x, scale.y, scale.z, scale.w};
    bool visible[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) visible[e] = page >= 0 && row + e < rows_;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int query = warp + i * kWarps;
      if (query >= group_.count) continue;
      float score[4];
      sums.load(query, lane, score);
#pragma unroll
      for (int e = 0; e < 4; ++e) score[e] *= scales[e];
      p_.stored.store(number_, group_, query, row, visible, score, seen_[i]);
    }
  }

  // What stored.tiles() has behind the rows that the group sees.
  __device__ __forceinline__ void store_rest() const {
    const bool none[4] = {};
    const float zeros[4] = {};
    const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
    for (int tile = first_ + tiles_; tile < end_; ++tile) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int query = warp + i * kWarps;
        if (query >= group_.count) continue;
        p_.stored.store(number_, group_, query, tile * kTileRows + 4 * lane, none, zeros, seen_[i]);
      }
    }
  }

 private:
  static constexpr int kOwn = kParts / kWarps;  // queries of a warp at most, for store()

  // The page at that place of the table, or -1. Entries behind the context are not read.
  __device__ int look_up(int place) const {
    if (place >= ceil_div(rows_, gpu::kPagedPageRows)) return -1;
    const int page = __ldg(table_ + place);
    return page < 0 || page >= p_.num_pages ? -1 : page;
  }
  __device__ int load(int tile, int warp) const {
    if (tile >= tiles_) return -1;
    return look_up(2 * (first_ + tile) + warp * kWarpRows / gpu::kPagedPageRows);
  }

  const PagedParams<Stored>& p_;
  const std::int32_t* table_;
  gpu::QueryGroup group_;
  int number_, rows_, first_, end_, tiles_, page_, next_;
  int seen_[kOwn];
};

template <class Stored>
__global__ void __launch_bounds__(kThreads, 1)
    paged_kernel(const __grid_constant__ PagedParams<Stored> p) {
  PagedWork<Stored> work(p);
  work.store_rest();
  if (work.tiles() > 0) score_tiles<DType::f8_e4m3>(plan(), p.columns, work);
}

}  // namespace winnow::indexer::cuda_detail
