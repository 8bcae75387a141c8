// What the operations on a paged cache share behind the entry point: plain descriptions of their
// tensors, and the checks that make them. Internal.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "winnow/core/dtype.h"
#include "winnow/core/rows.h"
#include "winnow/core/tensor.h"

namespace winnow {
class Check;
}

namespace winnow::paged_xl {

// What key cache and value cache agree on. Within one block and head both are dense.
struct CacheShape {
  DType dtype = DType::f32;
  std::int64_t num_blocks = 0, num_kv_heads = 0, head_size = 0, block_size = 0;
  // Elements of one key that lie side by side: 16 bytes of them.
  std::int64_t x() const { return 16 / size_of(dtype); }
  std::int64_t blocks_for(std::int64_t tokens) const {
    return (tokens + block_size - 1) / block_size;
  }
};

// Checks head size, block size, layout, dtype and device of both caches.
CacheShape check_cache(const Check& check, const ConstTensorView& key_cache,
                       const ConstTensorView& value_cache, DType dtype, Device device);

// Rules of the contracts.
void check_scale(const Check& check, std::optional<double> scale, const ConstTensorView& query);
void check_head_size(const Check& check, const ConstTensorView& query);
// matrix_bd [num_seqs, num_heads, columns]: its rank, and that it is in the query's dtype or f32;
// f64 with f64.
void check_matrix_bd(const Check& check, const ConstTensorView& matrix_bd,
                     const ConstTensorView& query);

// A bias per head, or per sequence and head; the first stride of the result is 0 for the former.
Rows<const void*> pos_bias_of(const ConstTensorView& bias);

// Contents: every length in [0, limit]. `reason` says what sets the limit.
void check_lengths(const Check& check, const std::int32_t* context_lens, std::int64_t num_seqs,
                   std::int64_t limit, std::string_view reason);

}  // namespace winnow::paged_xl
