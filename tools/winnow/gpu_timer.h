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
// or in a launched world that of the rank, where all ranks run it as often), and the benchmark's
// ceiling, a bf16 matrix product by cuBLAS on random numbers or a copy, in turn, and times each run
// by CUDA events. If the benchmark is `cold`, the L2 cache is emptied before each run of the
// operation; otherwise inputs larger than it are not flushed from it. `queued` is for calls of
// several ranks: a rank's run would else last from its own host's waking to that of the last one.
// Throws Error (unsupported) without cuBLAS where the ceiling is a product.
Measured measure_on_gpu(const std::function<void()>& operation, const testing::Benchmark& benchmark,
                        const BenchOptions& options);

}  // namespace winnow::cli
