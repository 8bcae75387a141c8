// One row into a paged cache, on the CPU. Internal; compiled once per instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#include "winnow/cache/cache.h"
#include "winnow/cpu/convert.h"
#include "winnow/cpu/quantize_f8.h"

namespace winnow::cache {

// Writes a row whose columns are bf16, into a slot that the cache holds. Caches may be unaligned
// memory, so that scales are copied by bytes.
inline void write_latent_row(const sparse_mla::Cache<std::uint8_t>& cache,
                             const std::uint8_t* brain, std::int64_t slot) {
  using sparse_mla::CacheFormat, sparse_mla::Row584, sparse_mla::Row656;
  constexpr std::int64_t kMostQuantised = Row656::kQuantised;
  std::uint8_t* row = cache.row(slot);
  if (cache.format == CacheFormat::bf16) {
    std::memcpy(row, brain, static_cast<std::size_t>(cache.columns) * sizeof(BFloat16));
    return;
  }
  const bool wide = cache.format == CacheFormat::fp8_656;
  const std::int64_t quantised = wide ? Row656::kQuantised : Row584::kQuantised;
  float x[kMostQuantised], scales[Row584::kGroups];
  load_f32(DType::bf16, brain, 0, quantised, x);
  const std::int64_t group = wide ? Row656::kGroup : Row584::kGroup;
  for (std::int64_t first = 0; first < quantised; first += group) {
    scales[first / group] = quantize_f8(x + first, group, true, row + first);
  }
  const std::uint8_t* rope = brain + 2 * quantised;
  if (wide) {
    std::memcpy(row + Row656::kScaleOffset, scales, Row656::kGroups * sizeof(float));
    std::memcpy(row + Row656::kRopeOffset, rope, 2 * Row656::kRope);
    return;
  }
  std::uint8_t* bytes = cache.scales_584(slot);
  for (std::int64_t g = 0; g < Row584::kGroups; ++g)
    bytes[g] = sparse_mla::scale_to_ue8m0(scales[g]);
  bytes[Row584::kGroups] = 0;
  std::memcpy(row + Row584::kRopeOffset, rope, 2 * Row584::kRope);
}

// Writes a key of d numbers into a slot that the pages hold. Pages may be unaligned memory.
inline void write_key_row(const indexer::KeyPages& pages, const float* key, std::int64_t slot) {
  std::uint8_t* page = pages.pages.data + pages.pages.offset(slot / indexer::kPageRows);
  const std::int64_t place = slot % indexer::kPageRows;
  const float scale = quantize_f8(key, pages.d, pages.power_of_two, page + place * pages.d);
  std::memcpy(page + indexer::kPageRows * pages.d + place * sizeof(float), &scale, sizeof(float));
}

}  // namespace winnow::cache
