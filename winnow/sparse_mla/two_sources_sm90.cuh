// The entries of a query of two sources (two_sources.cuh), in the tiles of kernels of sm90.
#pragma once

#include <cstdint>

#include "winnow/sparse_mla/gather_sm90.cuh"
#include "winnow/sparse_mla/two_sources.cuh"

namespace winnow::sparse_mla {

class QueryEntries : public QueryTiles<kTileRows> {
 public:
  using QueryTiles::QueryTiles;

  // As load_tile() for one list. Entries past the end are absent.
  __device__ __forceinline__ TileEntries load(int tile, int lane) const {
    const GatherView& view = rows(tile);
    const int first = first_of(tile) + lane, left = end_of(tile) - first;
    TileEntries loaded{first, first + 32};
    if (view.indices != nullptr) {
      const std::int32_t* const at = row_of(view) + first;
      if (left > 0) loaded.low = __ldg(at);
      if (left > 32) loaded.high = __ldg(at + 32);
    }
    if (left <= 0) loaded.low = -1;
    if (left <= 32) loaded.high = -1;
    return loaded;
  }
};

}  // namespace winnow::sparse_mla
