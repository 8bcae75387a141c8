// What forward() hands to its backends. Internal.
#pragma once

#include <span>

#include "winnow/compressor/problem.h"
#include "winnow/core/executor.h"

namespace winnow::compressor {

struct ForwardParams {
  Problem problem;
  std::span<const Sequence> sequences;  // checked
  DType rows_dtype = DType::f32;
  Rows<void*> rows;  // [rows, d]
};

void forward_cpu(const ForwardParams& params, const Executor& executor);

}  // namespace winnow::compressor
