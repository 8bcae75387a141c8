// New rows into a cache on the CPU, row by row.
#include "winnow/cache/write_row_cpu.h"
#include "winnow/sparse_mla/store/store_impl.h"

namespace winnow::sparse_mla {

void store_cpu(const StoreParams& params, const Executor& executor) {
  constexpr std::int64_t kRows = 16;  // of a work item: some microseconds
  const auto* rows = static_cast<const BFloat16*>(params.rows.data);
  executor.for_each_range(params.n, kRows, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t i = begin; i < end; ++i) {
      // Another thread may have changed the slot since it was checked.
      const std::int64_t slot = params.slots[i];
      if (!params.cache.holds(slot)) continue;
      cache::write_latent_row(
          params.cache, reinterpret_cast<const std::uint8_t*>(rows + params.rows.offset(i)), slot);
    }
  });
}

}  // namespace winnow::sparse_mla
