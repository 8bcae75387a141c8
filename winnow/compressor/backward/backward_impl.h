// What backward() hands to its backends. Internal.
#pragma once

#include <span>

#include "winnow/compressor/problem.h"
#include "winnow/core/executor.h"

namespace winnow::compressor {

struct BackwardParams {
  Problem problem;
  std::span<const Sequence> sequences;  // checked
  DType d_rows_dtype = DType::f32, d_kv_dtype = DType::f32, d_gate_dtype = DType::f32;
  Rows<const void*> d_rows;       // [rows, d]
  Rows<void*> d_kv, d_gate;       // [tokens, series * d]
  Rows<void*> d_position_bias;    // [ratio, series * d]
  void* d_norm_weight = nullptr;  // [d]; null: no norm
};

void backward_cpu(const BackwardParams& params, const Executor& executor);

}  // namespace winnow::compressor
