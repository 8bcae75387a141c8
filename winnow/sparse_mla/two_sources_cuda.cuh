// The entries of a query of two sources (two_sources.cuh), in the tiles of attention_cuda.cuh.
#pragma once

#include <cstdint>

#include "winnow/device/common/copy.cuh"
#include "winnow/device/common/places.cuh"
#include "winnow/sparse_mla/two_sources.cuh"

namespace winnow::sparse_mla {

template <int kRows>
class CopiedTiles : public QueryTiles<kRows> {
 public:
  using QueryTiles<kRows>::QueryTiles;

  __device__ __forceinline__ std::int32_t entry(int, int, std::int32_t brought) const {
    return brought;
  }
  __device__ __forceinline__ bool holds(int tile, std::int32_t entry) const {
    return static_cast<std::uint32_t>(entry) < this->visible(tile);
  }
  // Starts to bring entry `n` of a tile to its place: -1 if it is absent.
  __device__ __forceinline__ void bring(int tile, int n, device::Place<std::int32_t> place) const {
    const GatherView& view = this->rows(tile);
    const int at = this->column(tile, n);
    if (at < 0 || view.indices == nullptr) {
      place.store(at);
    } else {
      device::cp_async_word_zfill(place.address, this->row_of(view) + at, true);
    }
  }
};

}  // namespace winnow::sparse_mla
