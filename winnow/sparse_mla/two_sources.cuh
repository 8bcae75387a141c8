// Which rows a query sees of two sources, of which the second may be absent. Whether a source has
// lists or ranges shows when the kernel runs.
//
// A tile belongs to one source, so that it has one cache, and the tiles of the first come before
// those of the second. The tiles of a range begin at its first row: a window of 128 rows is as many
// tiles wherever it lies.
#pragma once

#include <algorithm>
#include <cstdint>

#include "winnow/core/rows.h"
#include "winnow/device/common/math.cuh"
#include "winnow/device/common/warp.cuh"
#include "winnow/sparse_mla/entries.cuh"

namespace winnow::sparse_mla {

// The rows of a source that a query may see, as visible_rows() has them, but without its division
// of 64 bits. Query 0 does not see the last `hidden` rows, some of which need not exist, and has
// seen `tokens` of the next row's.
class CausalRows {
 public:
  CausalRows() = default;
  explicit CausalRows(const Source& source) : s_kv_(static_cast<std::uint32_t>(source.s_kv)) {
    if (!source.causal) return;
    const std::int64_t seen = source.q_start + 1, stride = source.k_stride;
    std::int64_t tokens = seen % stride;
    if (tokens < 0) tokens += stride;
    const std::int64_t rows = (seen - tokens) / stride;
    constexpr std::int64_t kFar = std::int64_t{1} << 30;  // at least as many as there are queries
    hidden_ = static_cast<std::uint32_t>(source.s_kv - std::clamp(rows, -kFar, source.s_kv));
    const std::int64_t near = std::min(stride, 2 * kFar);
    if (near < stride) tokens = near - std::min(stride - tokens, kFar);
    tokens_ = static_cast<std::uint32_t>(tokens);
    stride_ = device::FastDivmod(static_cast<std::uint32_t>(near));
  }

  __device__ __forceinline__ std::uint32_t visible(std::uint32_t query) const {
    const std::uint32_t seen = stride_.divide(tokens_ + query).quotient;
    return s_kv_ - min(hidden_ - min(seen, hidden_), s_kv_);
  }

 private:
  std::uint32_t s_kv_ = 0, hidden_ = 0, tokens_ = 0;
  device::FastDivmod stride_;
};

struct SourceView {
  GatherView rows;  // without `indices` entry j is row j
  CausalRows causal;
};
struct TwoSources {
  SourceView source[2];
  // Of each source where the entries of a query begin and end: a range does as its query says, a
  // list begins at 0 and ends at topk_length.
  Rows<const std::int32_t*> limits[4];  // [s_q]
};

inline TwoSources two_sources(const Problem& problem) {
  TwoSources sources;
  const Source* const both[] = {&problem, &problem.extra};
  for (int s = 0; s < 2; ++s) {
    const Source& source = *both[s];
    sources.source[s] = {gather_view(source, problem), CausalRows(source)};
    sources.limits[2 * s] = source.key_start;
    sources.limits[2 * s + 1] = source.dense ? source.key_end : source.topk_length;
  }
  return sources;
}

// The limits of a query, 0 where there is none: lane l has number l % 4. They are loaded long
// before they are needed.
__device__ __forceinline__ std::int32_t load_limits(const TwoSources& sources, std::int64_t query,
                                                    int lane) {
  const Rows<const std::int32_t*>& limit = sources.limits[lane & 3];
  return limit.present() ? __ldg(limit.data + query * limit.stride0) : 0;
}

// The entries of a query, in tiles of kRows.
template <int kRows>
class QueryTiles {
 public:
  // The whole warp must call, with what load_limits() gave it.
  __device__ __forceinline__ QueryTiles(const TwoSources& sources, std::int64_t query,
                                        std::int32_t limits)
      : sources_(sources), query_(static_cast<std::uint32_t>(query)) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const GatherView& rows = sources.source[s].rows;
      visible_[s] = sources.source[s].causal.visible(query_);
      const int all = rows.indices == nullptr ? static_cast<int>(visible_[s]) : rows.topk;
      const int start = __shfl_sync(device::kFullWarp, limits, 2 * s);
      const int end = __shfl_sync(device::kFullWarp, limits, 2 * s + 1);
      // As row_range(), in 32 bits.
      end_[s] = sources.limits[2 * s + 1].present() ? max(min(end, all), 0) : all;
      begin_[s] = min(max(start, 0), end_[s]);
    }
  }

  // Of a source: entries [begin(), end()), and rows below visible_of().
  __device__ __forceinline__ int begin(int s) const { return begin_[s]; }
  __device__ __forceinline__ int end(int s) const { return end_[s]; }
  __device__ __forceinline__ std::uint32_t visible_of(int s) const { return visible_[s]; }

  __device__ __forceinline__ int tiles() const { return first_tiles() + tiles_of(1); }
  __device__ __forceinline__ bool is_second(int tile) const { return source(tile) == 1; }
  // Below it the rows of the tile's entries are visible.
  __device__ __forceinline__ std::uint32_t visible(int tile) const {
    return source(tile) == 0 ? visible_[0] : visible_[1];
  }
  __device__ __forceinline__ const GatherView& rows(int tile) const {
    return sources_.source[source(tile)].rows;
  }

  // Where entry `n` of a tile stands among the entries of its source, which for a range are the
  // rows of its cache; -1 past the end.
  __device__ __forceinline__ int column(int tile, int n) const {
    const int at = first_of(tile) + n;
    return at < end_of(tile) ? at : -1;
  }
  // That entry; -1 if it is absent.
  __device__ __forceinline__ std::int32_t load(int tile, int n) const {
    const GatherView& view = rows(tile);
    const int at = column(tile, n);
    return at < 0 || view.indices == nullptr ? at : __ldg(row_of(view) + at);
  }

 protected:
  // Entries [first_of(), end_of()) are those of the tile and of the tiles of its source behind it.
  __device__ __forceinline__ int first_of(int tile) const {
    return source(tile) == 1 ? begin_[1] + (tile - first_tiles()) * kRows
                             : begin_[0] + tile * kRows;
  }
  __device__ __forceinline__ int end_of(int tile) const {
    return source(tile) == 1 ? end_[1] : end_[0];
  }
  __device__ __forceinline__ const std::int32_t* row_of(const GatherView& view) const {
    return view.indices + static_cast<std::int64_t>(query_) * view.indices_stride;
  }

 private:
  __device__ __forceinline__ int tiles_of(int s) const {
    return device::ceil_div(end_[s] - begin_[s], kRows);
  }
  __device__ __forceinline__ int first_tiles() const { return tiles_of(0); }
  __device__ __forceinline__ int source(int tile) const { return tile >= first_tiles(); }

  const TwoSources& sources_;
  std::uint32_t query_;
  int begin_[2], end_[2];
  std::uint32_t visible_[2];
};

}  // namespace winnow::sparse_mla
