// What position_term() hands to its backends. Internal.
#pragma once

#include <cstdint>

#include "winnow/core/executor.h"
#include "winnow/paged_xl/problem.h"

namespace winnow::paged_xl {

struct PositionTermParams {
  DType dtype = DType::f32;
  std::int64_t num_seqs = 0, num_heads = 0, head_size = 0;
  Rows<const void*> query;       // [num_seqs, num_heads, head_size]
  Rows<const void*> pos_bias_v;  // [num_seqs, num_heads, head_size]; stride0 = 0 without num_seqs
  Rows<const void*> r;           // [num_heads, max_distance, head_size]
  const std::int32_t* context_lens = nullptr;  // [num_seqs]
  std::int64_t max_context = 0;                // what matrix_bd and r hold
  Rows<void*> matrix_bd;                       // [num_seqs, num_heads, columns]
  DType matrix_bd_dtype = DType::f32;
};

void position_term_cpu(const PositionTermParams& params, const Executor& executor);

// Queues the kernel on `stream` (a cudaStream_t) of the current device, which holds the tensors.
// Wants at least one sequence and head. Lengths are clamped to [0, max_context]. Allocates nothing
// and does not wait, so the stream may be in capture.
void position_term_cuda(const PositionTermParams& params, void* stream);

}  // namespace winnow::paged_xl
