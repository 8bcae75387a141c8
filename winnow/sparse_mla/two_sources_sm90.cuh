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
    // A load is the last to write its register: a value chosen behind it would wait for it, and the
    // copies of the tile before, which come next, with it.
    TileEntries loaded{left > 0 ? first : -1, left > 32 ? first + 32 : -1};
    if (view.indices != nullptr) {
      const std::int32_t* const at = row_of(view) + first;
      if (left > 0) loaded.low = __ldg(at);
      if (left > 32) loaded.high = __ldg(at + 32);
    }
    return loaded;
  }
};

}  // namespace winnow::sparse_mla
