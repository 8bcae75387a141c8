// Quantisation of new rows into a cache on the CPU, row by row.
#include <algorithm>
#include <bit>
#include <cstring>

#include "winnow/cpu/convert.h"
#include "winnow/sparse_mla/store/store_impl.h"

namespace winnow::sparse_mla {
namespace {

constexpr std::int64_t kMostColumns = 576;

// f8 = f8_e4m3(x / scale) of one group, and its scale.
float quantise_group(const float* x, std::int64_t count, std::uint8_t* f8) {
  // Magnitudes order as their bits do, NaN above infinity above the rest.
  std::uint32_t amax = 0;
  for (std::int64_t c = 0; c < count; ++c) {
    amax = std::max(amax, std::bit_cast<std::uint32_t>(x[c]) & 0x7fffffffu);
  }
  const float scale = cache_scale(std::bit_cast<float>(amax));
  if (scale != scale) {
    std::memset(f8, 0x7f, static_cast<std::size_t>(count));
    return scale;
  }
  for (std::int64_t c = 0; c < count; ++c) f8[c] = Float8E4M3(x[c] / scale).bits;
  return scale;
}

// Caches may be unaligned memory, so that scales are copied by bytes.
void store_row(const Cache<std::uint8_t>& cache, const std::uint8_t* brain, std::int64_t slot) {
  std::uint8_t* row = cache.row(slot);
  if (cache.format == CacheFormat::bf16) {
    std::memcpy(row, brain, static_cast<std::size_t>(cache.columns) * sizeof(BFloat16));
    return;
  }
  float x[kMostColumns];
  load_f32(DType::bf16, brain, 0, cache.columns, x);
  if (cache.format == CacheFormat::fp8_656) {
    float scales[Row656::kGroups];
    for (std::int64_t g = 0; g < Row656::kGroups; ++g) {
      const std::int64_t first = g * Row656::kGroup;
      scales[g] = quantise_group(x + first, Row656::kGroup, row + first);
    }
    std::memcpy(row + Row656::kScaleOffset, scales, sizeof scales);
    std::memcpy(row + Row656::kRopeOffset, brain + 2 * Row656::kQuantised, 2 * Row656::kRope);
    return;
  }
  std::uint8_t* scales = cache.scales_584(slot);
  for (std::int64_t g = 0; g < Row584::kGroups; ++g) {
    const std::int64_t first = g * Row584::kGroup;
    scales[g] = scale_to_ue8m0(quantise_group(x + first, Row584::kGroup, row + first));
  }
  scales[Row584::kGroups] = 0;
  std::memcpy(row + Row584::kRopeOffset, brain + 2 * Row584::kQuantised, 2 * Row584::kRope);
}

}  // namespace

void store_cpu(const StoreParams& params, const Executor& executor) {
  constexpr std::int64_t kRows = 16;  // of a work item: some microseconds
  const auto* rows = static_cast<const BFloat16*>(params.rows.data);
  executor.for_each_range(params.n, kRows, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t i = begin; i < end; ++i) {
      // Another thread may have changed the slot since it was checked.
      const std::int64_t slot = params.slots[i];
      if (!params.cache.holds(slot)) continue;
      store_row(params.cache, reinterpret_cast<const std::uint8_t*>(rows + params.rows.offset(i)),
                slot);
    }
  });
}

}  // namespace winnow::sparse_mla
