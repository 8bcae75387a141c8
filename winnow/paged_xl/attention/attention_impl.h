// What attention() hands to its backends. Internal.
#pragma once

#include <cstdint>

#include "winnow/core/executor.h"
#include "winnow/paged_xl/problem.h"

namespace winnow::paged_xl {

struct AttentionParams {
  CacheShape cache;
  std::int64_t num_seqs = 0, num_heads = 0;
  double scale = 0;              // rounded to f32 unless the cache is in f64
  Rows<const void*> query;       // [num_seqs, num_heads, head_size]
  Rows<const void*> key, value;  // [num_blocks, num_kv_heads], blocks dense
  Rows<const void*> pos_bias_u;  // [num_seqs, num_heads, head_size]; stride0 = 0 without num_seqs
  Rows<const void*> matrix_bd;   // [num_seqs, num_heads, columns]; null in fused mode
  DType matrix_bd_dtype = DType::f32;
  Rows<const void*> pos_bias_v;            // as pos_bias_u; null in plain mode
  Rows<const void*> r;                     // [num_heads, max_distance, head_size]; null in plain
  Rows<const std::int32_t*> block_tables;  // [num_seqs, max_blocks_per_seq]
  const std::int32_t* context_lens = nullptr;  // [num_seqs]
  std::int64_t max_context = 0;                // what block_tables and matrix_bd or r hold
  Rows<void*> out;                             // [num_seqs, num_heads, head_size]
  Rows<void*> lse;  // [num_seqs, num_heads], of accumulator_of() the cache's dtype; may be null
};

void attention_cpu(const AttentionParams& params, const Executor& executor);

// Queues the kernels on `stream` (a cudaStream_t) of the current device, which holds the tensors.
// Wants at least one sequence and head. Lengths are clamped to [0, max_context], blocks that the
// cache does not have are skipped. Does not wait. `workspace`: attention_cuda_workspace_bytes() of
// that device, aligned to 256 bytes, in use until the stream has passed; null takes it from the
// pool in stream order. Either way the stream may be in capture.
void attention_cuda(const AttentionParams& params, void* workspace, void* stream);
std::int64_t attention_cuda_workspace_bytes(const AttentionParams& params);

}  // namespace winnow::paged_xl
