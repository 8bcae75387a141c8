// Quantisation on the CPU, row by row.
#include <cstring>

#include "winnow/cpu/convert.h"
#include "winnow/cpu/quantize_f8.h"
#include "winnow/indexer/quantize/quantize.h"
#include "winnow/indexer/quantize/quantize_impl.h"

namespace winnow::indexer {
namespace {

constexpr std::int64_t kMostColumns = 128;

// `elements` may be unaligned memory, as pages are; returns the scale.
float quantize_row(const QuantizeParams& params, std::int64_t i, std::int64_t h,
                   std::uint8_t* elements) {
  float x[kMostColumns];
  load_f32(params.dtype, params.x.data, params.x.offset(i, h), params.d, x);
  return quantize_f8(x, params.d, params.power_of_two, elements);
}

}  // namespace

void quantize_cpu(const QuantizeParams& params, const Executor& executor) {
  constexpr std::int64_t kRows = 64;  // of a work item: some microseconds
  executor.for_each_range(
      params.n * params.h, kRows, [&](std::int64_t begin, std::int64_t end, int) {
        for (std::int64_t row = begin; row < end; ++row) {
          const std::int64_t i = row / params.h, h = row % params.h;
          if (params.rows.present()) {
            params.scale.data[params.scale.offset(i, h)] =
                quantize_row(params, i, h, params.rows.data + params.rows.offset(i, h));
            continue;
          }
          // Another thread may have changed the slot since it was checked.
          const std::int64_t slot = params.slots[i];
          if (slot < 0 || slot / kPageRows >= params.num_pages) continue;
          std::uint8_t* page = params.pages.data + params.pages.offset(slot / kPageRows);
          const std::int64_t place = slot % kPageRows;
          const float scale = quantize_row(params, i, h, page + place * params.d);
          std::memcpy(page + kPageRows * params.d + place * sizeof(float), &scale, sizeof(float));
        }
      });
}

}  // namespace winnow::indexer
