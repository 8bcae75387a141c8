// What the operations on a paged cache share below the door: plain descriptions of their tensors,
// and the checks that make them. Internal.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "winnow/core/check.h"
#include "winnow/core/dtype.h"
#include "winnow/core/on_host.h"
#include "winnow/core/rows.h"
#include "winnow/core/tensor.h"

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

// The sizes that a step's query brings.
struct StepShape {
  DType dtype = DType::f32;
  Device device;
  std::int64_t num_seqs = 0, num_heads = 0, head_size = 0;
};

StepShape check_query(const Check& check, const ConstTensorView& query);

// A bias per head, or per sequence and head; the first stride of the result is 0 for the former.
Rows<const void*> check_pos_bias(const Check& check, std::string_view argument,
                                 const ConstTensorView& bias, const StepShape& step);

// r [num_heads, max_distance, head_size].
Rows<const void*> check_relative(const Check& check, const ConstTensorView& r,
                                 const StepShape& step);

// matrix_bd [num_seqs, num_heads, columns], in the query's dtype or f32; f64 with f64.
void check_matrix_bd(const Check& check, const ConstTensorView& matrix_bd, const StepShape& step);

const std::int32_t* check_context_lens(const Check& check, const ConstTensorView& context_lens,
                                       const StepShape& step);

// Contents: every length in [0, limit]. `reason` says what sets the limit.
void check_lengths(const Check& check, const std::int32_t* context_lens, std::int64_t num_seqs,
                   std::int64_t limit, std::string_view reason);

}  // namespace winnow::paged_xl
