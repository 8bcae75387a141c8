// Caches for the case tables, tests and benchmarks of decode and store.
#pragma once

#include <cstdint>
#include <string>

#include "winnow/cache/cache_format.h"
#include "winnow/testing/strided.h"

namespace winnow::sparse_mla {

// Elements of the last dimension; `columns` for bf16.
std::int64_t row_elements(CacheFormat format, std::int64_t columns = 576);
// Columns that a row stands for; `columns` for bf16.
std::int64_t row_columns(CacheFormat format, std::int64_t columns = 576);
// "fp8_656", and for bf16 with its columns "bf16_576".
std::string name_of(CacheFormat format, std::int64_t columns = 576);

// An unwritten cache. fp8_584 has its blocks padded; with another layout than dense there are gaps
// between the blocks and, where the format allows, between the rows.
testing::StridedTensor make_cache(CacheFormat format, std::int64_t blocks, std::int64_t block_size,
                                  std::int64_t columns = 576,
                                  testing::Layout layout = testing::Layout::dense);

}  // namespace winnow::sparse_mla
