// What forward() hands to its backends. Internal.
#pragma once

#include <span>

#include "winnow/compressor/problem.h"
#include "winnow/core/executor.h"

namespace winnow::compressor {

struct ForwardParams {
  Problem problem;
  std::span<const Sequence> sequences;  // on the CPU; checked
  std::int64_t num_rows = 0;
  DType rows_dtype = DType::f32;
  Rows<void*> rows;      // [rows, d]
  void* rstd = nullptr;  // [rows], of accumulator_of(dtype); null: not wanted
};

void forward_cpu(const ForwardParams& params, const Executor& executor);
// Queues its work on `stream` (null: the default stream) of the current device. `lists` are there,
// too; what they say is clamped.
void forward_cuda(const ForwardParams& params, const Packed& lists, void* stream);

}  // namespace winnow::compressor
