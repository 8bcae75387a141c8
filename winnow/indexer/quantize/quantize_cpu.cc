// Quantisation on the CPU, row by row.
#include "winnow/cache/write_row_cpu.h"
#include "winnow/indexer/quantize/quantize_impl.h"

namespace winnow::indexer {

void quantize_cpu(const QuantizeParams& params, const Executor& executor) {
  constexpr std::int64_t kMostColumns = 128, kRows = 64;  // of a work item: some microseconds
  executor.for_each_range(
      params.n * params.h, kRows, [&](std::int64_t begin, std::int64_t end, int) {
        for (std::int64_t row = begin; row < end; ++row) {
          const std::int64_t i = row / params.h, h = row % params.h;
          // Another thread may have changed the slot since it was checked.
          const bool paged = params.pages.present();
          const std::int64_t slot = paged ? params.slots[i] : -1;
          if (paged && !params.pages.holds(slot)) continue;
          float x[kMostColumns];
          load_f32(params.dtype, params.x.data, params.x.offset(i, h), params.d, x);
          if (paged) {
            cache::write_key_row(params.pages, x, slot);
          } else {
            params.scale.data[params.scale.offset(i, h)] = quantize_f8(
                x, params.d, params.power_of_two, params.rows.data + params.rows.offset(i, h));
          }
        }
      });
}

}  // namespace winnow::indexer
