// A cache of latent rows as kernels see it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "winnow/cache/cache.h"

namespace winnow::sparse_mla {

// Slots from `slots` on are not in the cache. Strides count bytes.
template <class Byte>
struct CacheView {
  Byte* data;
  std::int64_t block_stride, row_stride;
  std::uint32_t slots, block_size;  // slots below 2^31, block_size at least 1

  // Unsigned, so that a negative slot is none either.
  __device__ bool holds(std::int64_t slot) const {
    return static_cast<std::uint64_t>(slot) < slots;
  }
  __device__ Byte* row(std::uint32_t block, std::uint32_t offset) const {
    return data + block * block_stride + offset * row_stride;
  }
  // In fp8_584.
  __device__ Byte* scales_584(std::uint32_t block, std::uint32_t offset) const {
    return data + block * block_stride + Row584::scale_offset(block_size, offset);
  }
};

template <class Byte>
CacheView<Byte> cache_view(const Cache<Byte>& cache) {
  return {cache.data, cache.block_stride, cache.row_stride,
          static_cast<std::uint32_t>(cache.slots()),
          static_cast<std::uint32_t>(std::max<std::int64_t>(cache.block_size, 1))};
}

}  // namespace winnow::sparse_mla
