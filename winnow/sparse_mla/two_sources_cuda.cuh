// The entries of a query of two sources (two_sources.cuh), in the tiles of attend_cuda.cuh. What
// bounds them lies in shared memory, since registers are scarce: it is found once, so that whatever
// is written to the limits meanwhile, all warps go by the same tiles.
#pragma once

#include <cstdint>

#include "winnow/device/common/copy.cuh"
#include "winnow/device/common/places.cuh"
#include "winnow/sparse_mla/attend_cuda.cuh"
#include "winnow/sparse_mla/two_sources.cuh"

namespace winnow::sparse_mla {

// Of each source: where the query's entries begin and end, and below what its rows are visible;
// then the query, and one word more.
using EntryBounds = std::int32_t[8];

// The whole warp must call.
template <int kRows>
__device__ __forceinline__ void find_bounds(const TwoSources& sources, std::int64_t query, int lane,
                                            device::Place<EntryBounds> bounds) {
  const QueryTiles<kRows> tiles(sources, query, load_limits(sources, query, lane));
  if (lane != 0) return;
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    bounds[s].store(tiles.begin(s));
    bounds[2 + s].store(tiles.end(s));
    bounds[4 + s].store(static_cast<std::int32_t>(tiles.visible_of(s)));
  }
  bounds[6].store(static_cast<std::int32_t>(query));
}

template <int kRows>
class CopiedTiles {
 public:
  __device__ __forceinline__ CopiedTiles(const TwoSources& sources,
                                         device::Place<EntryBounds> bounds)
      : sources_(sources), bounds_(bounds), first_tiles_(tiles_of(0)) {}

  __device__ __forceinline__ int tiles() const { return first_tiles_ + tiles_of(1); }
  __device__ __forceinline__ const GatherView& rows(int tile) const {
    return sources_.source[source(tile)].rows;
  }
  __device__ __forceinline__ std::int32_t entry(int, int, std::int32_t brought) const {
    return brought;
  }
  __device__ __forceinline__ bool holds(int tile, std::int32_t entry) const {
    return static_cast<std::uint32_t>(entry) <
           static_cast<std::uint32_t>(bounds_[4 + source(tile)].load());
  }
  // Where entry `n` of a tile stands among those of its source; -1 past the end.
  __device__ __forceinline__ int column(int tile, int n) const {
    const int s = source(tile);
    const int at = bounds_[s].load() + (s == 0 ? tile : tile - first_tiles_) * kRows + n;
    return at < bounds_[2 + s].load() ? at : -1;
  }
  // Starts to bring entry `n` of a tile to its place: -1 if it is absent.
  __device__ __forceinline__ void bring(int tile, int n, device::Place<std::int32_t> place) const {
    const GatherView& view = rows(tile);
    const int at = column(tile, n);
    if (at < 0 || view.indices == nullptr) {
      place.store(at);
    } else {
      const std::int32_t* const list = view.indices + bounds_[6].load() * view.indices_stride;
      device::cp_async_word_zfill(place.address, list + at, true);
    }
  }

 private:
  __device__ __forceinline__ int source(int tile) const { return tile >= first_tiles_; }
  __device__ __forceinline__ int tiles_of(int s) const {
    return device::ceil_div(bounds_[2 + s].load() - bounds_[s].load(), kRows);
  }

  const TwoSources& sources_;
  device::Place<EntryBounds> bounds_;
  int first_tiles_;
};

// start_tile() of one of `tiles` tiles, whose rows go to a slot. Behind the last one zeros are
// copied, so that no branch is among the products; `memory` is any that may be read.
template <class P>
__device__ __forceinline__ auto start_copy(P shared,
                                           const CopiedTiles<attention_cuda::kRows>& entries,
                                           int tile, int tiles, int slot, const char* memory,
                                           int warp, int lane) {
  const auto copy_of = [&](int to, const char* row, bool visible) {
    return attention_cuda::RowCopy<P::kDim>(shared.rows()[slot], to, row, visible, lane);
  };
  if (tile >= tiles) {
    return attention_cuda::copies_of<P>(warp, lane,
                                        [&](int to) { return copy_of(to, memory, false); });
  }
  return attention_cuda::start_tile(
      shared, entries, tile, warp, lane, [&](int to, std::int32_t entry, bool visible) {
        const GatherView& rows = entries.rows(tile);
        return copy_of(to, rows.kv + std::int64_t{visible ? entry : 0} * rows.kv_stride, visible);
      });
}

}  // namespace winnow::sparse_mla
