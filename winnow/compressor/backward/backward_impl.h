// What backward() hands to its backends. Internal.
#pragma once

#include <cstdint>
#include <span>

#include "winnow/compressor/problem.h"
#include "winnow/core/executor.h"

namespace winnow::compressor {

struct BackwardParams {
  Problem problem;
  std::span<const Sequence> sequences;  // on the CPU; checked
  std::int64_t num_rows = 0;
  DType rows_dtype = DType::f32, d_rows_dtype = DType::f32;
  DType d_kv_dtype = DType::f32, d_gate_dtype = DType::f32;
  Rows<const void*> rows, d_rows;  // [rows, d]
  const void* rstd = nullptr;      // [rows]; like rows and d_norm_weight null without a norm
  Rows<void*> d_kv, d_gate;        // [tokens, series * d]
  Rows<void*> d_position_bias;     // [ratio, series * d]
  void* d_norm_weight = nullptr;   // [d]
};

void backward_cpu(const BackwardParams& params, const Executor& executor);
// Queues its work on `stream` (null: the default stream) of the current device. `lists` are there,
// too; what they say is clamped. `workspace`: backward_cuda_workspace_bytes() aligned to 256, or
// null: it is allocated in the order of the stream.
void backward_cuda(const BackwardParams& params, const Packed& lists, void* workspace,
                   void* stream);
std::int64_t backward_cuda_workspace_bytes(const BackwardParams& params);

}  // namespace winnow::compressor
