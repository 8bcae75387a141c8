// Which rows a query sees of two sources, for kernels of sm90 (gather_sm90.cuh). Whether a source
// has lists or ranges shows when the kernel runs.
//
// A tile belongs to one source, so that it has one cache, and the tiles of the first come before
// those of the second. The tiles of a range begin at its first row: a window of 128 rows is two
// tiles wherever it lies.
#pragma once

#include <cstdint>

#include "winnow/sparse_mla/gather_sm90.cuh"

namespace winnow::sparse_mla {

struct SourceView {
  GatherView rows;   // without `indices` entry j is row j
  RangeView limits;  // of the entries of a query; a list has no start, and ends at topk_length
};

inline SourceView source_view(const Source& source, const Problem& problem) {
  SourceView view{gather_view(source, problem), range_view(source)};
  if (!source.dense)
    view.limits = {nullptr, 0, view.rows.topk_length, view.rows.topk_length_stride};
  return view;
}

struct TwoSources {
  SourceView source[2];
};

inline TwoSources two_sources(const Problem& problem) {
  return {{source_view(problem, problem), source_view(problem.extra, problem)}};
}

// The limits of a query's entries, four numbers, 0 where there is none: lane l has number l % 4.
// They are loaded long before they are needed.
__device__ __forceinline__ std::int32_t load_limits(const TwoSources& sources, std::int64_t query,
                                                    int lane) {
  const RangeView& limits = sources.source[lane / 2 & 1].limits;
  const bool ends = lane & 1;
  const std::int32_t* const limit = ends ? limits.key_end : limits.key_start;
  if (limit == nullptr) return 0;
  return __ldg(limit + query * (ends ? limits.key_end_stride : limits.key_start_stride));
}

// The entries of a query.
class QueryEntries {
 public:
  // The whole warp must call, with what load_limits() gave it.
  __device__ __forceinline__ QueryEntries(const TwoSources& sources, std::int64_t query,
                                          std::int32_t limits)
      : sources_(sources), query_(query) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const GatherView& rows = sources.source[s].rows;
      visible_[s] = visible_rows(rows, query);
      const std::int64_t all = rows.indices == nullptr ? visible_[s] : rows.topk;
      const std::int64_t start = __shfl_sync(device::kFullWarp, limits, 2 * s);
      std::int64_t end = __shfl_sync(device::kFullWarp, limits, 2 * s + 1);
      if (end > all || sources.source[s].limits.key_end == nullptr) end = all;
      const RowRange range = row_range(start, end);
      begin_[s] = static_cast<int>(range.begin);
      end_[s] = static_cast<int>(range.end);
    }
  }

  // Entries of source s.
  __device__ __forceinline__ int begin(int s) const { return s == 0 ? begin_[0] : begin_[1]; }
  __device__ __forceinline__ int end(int s) const { return s == 0 ? end_[0] : end_[1]; }

  __device__ __forceinline__ int tiles() const { return first_tiles() + tiles_of(1); }
  // The source of a tile, the first of its entries, and below which row they are visible.
  __device__ __forceinline__ int source(int tile) const { return tile >= first_tiles(); }
  __device__ __forceinline__ int first_entry(int tile) const {
    return begin(source(tile)) + (tile - (source(tile) == 0 ? 0 : first_tiles())) * kTileRows;
  }
  __device__ __forceinline__ std::uint32_t visible(int tile) const {
    return source(tile) == 0 ? visible_[0] : visible_[1];
  }
  __device__ __forceinline__ const GatherView& rows(int tile) const {
    return sources_.source[source(tile)].rows;
  }

  // As load_tile() for one list. Entries past the end are absent.
  __device__ __forceinline__ TileEntries load(int tile, int lane) const {
    const GatherView& view = rows(tile);
    const int first = first_entry(tile) + lane, stop = end(source(tile));
    TileEntries loaded{-1, -1};
    if (view.indices == nullptr) {
      if (first < stop) loaded.low = first;
      if (first + 32 < stop) loaded.high = first + 32;
    } else {
      const std::int32_t* const list = view.indices + query_ * view.indices_stride;
      if (first < stop) loaded.low = __ldg(list + first);
      if (first + 32 < stop) loaded.high = __ldg(list + first + 32);
    }
    return loaded;
  }

 private:
  __device__ __forceinline__ int tiles_of(int s) const { return tile_count(end_[s] - begin_[s]); }
  __device__ __forceinline__ int first_tiles() const { return tiles_of(0); }

  const TwoSources& sources_;
  std::int64_t query_;
  int begin_[2], end_[2];
  std::uint32_t visible_[2];
};

}  // namespace winnow::sparse_mla
