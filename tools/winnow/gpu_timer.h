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

// Runs `operation`, which queues work on the default stream of this process's GPU (the first one,
// or in a launched world that of the rank, where all ranks run it as often), and the ceiling, a
// bf16 matrix product by cuBLAS on random numbers or a copy, in turn: many runs queued one behind
// the other, each timed by CUDA events. If `cold`, the L2 cache is emptied before each run of the
// operation; otherwise inputs larger than it are not flushed from it. Throws Error (unsupported)
// without cuBLAS where the ceiling is a product.
Measured measure_on_gpu(const std::function<void()>& operation, const testing::Ceiling& ceiling,
                        bool cold, const BenchOptions& options);

}  // namespace winnow::cli
