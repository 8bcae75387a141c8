// What step() hands to its backends. Internal.
#pragma once

#include <span>

#include "winnow/compressor/problem.h"
#include "winnow/core/executor.h"

namespace winnow::compressor {

struct StepParams {
  Problem problem;
  // Checked; `rows` are the windows that the new tokens complete, 0 without a state.
  std::span<const Sequence> sequences;
  Rows<void*> state;  // [states, ring, 2 * series * d]
  std::int64_t ring = 0;
  DType rows_dtype = DType::f32;
  Rows<void*> rows;  // [tokens, d]
};

void step_cpu(const StepParams& params, const Executor& executor);

}  // namespace winnow::compressor
