// Times GPU work beside its ceiling.
#pragma once

#include <functional>
#include <vector>

#include "tools/winnow/commands.h"

#include "winnow/testing/operation.h"

namespace winnow::cli {

// Median seconds of one run; ceiling 0: there is none.
struct Measured {
  double operation = 0, ceiling = 0;
};

// 0 for no values; between the middle two for an even number.
double median(std::vector<double> values);

// Runs `operation`, which queues work on the default stream of the first GPU, and the ceiling, a
// bf16 matrix product by cuBLAS on random numbers, in turn, and times each run by CUDA events.
// Inputs larger than the L2 cache are not flushed from it. Throws Error (unsupported) without
// cuBLAS.
Measured measure_on_gpu(const std::function<void()>& operation, const testing::Ceiling& ceiling,
                        const BenchOptions& options);

}  // namespace winnow::cli
