// Times an operation on a GPU and its ceiling, the work that shows how fast it could be.
#pragma once

#include <functional>
#include <vector>

#include "tools/winnow/commands.h"

#include "winnow/testing/operation.h"

namespace winnow::cli {

// Median seconds of one run of each.
struct Measured {
  double operation = 0;
  double ceiling = 0;                     // 0: the benchmark has none
  double product = 0;                     // alone; 0: the benchmark runs beside none
  double beside = 0, product_beside = 0;  // the operation and the product, at the same time
};

// 0 for no values; between the middle two for an even number.
double median(std::vector<double> values);

// The default stream. For a benchmark in a graph another one, as nothing can be captured there; for
// one beside products a stream whose kernels come before theirs where an SM is free, as those of a
// communication do in a training program.
Stream timed_stream(const testing::Benchmark& benchmark);

// Times `operation` and the benchmark's ceiling, a bf16 matrix product on random numbers or a copy,
// by CUDA events, in alternating batches: several runs of one, then several of the
// other. `operation` queues its work on timed_stream() of GPU 0, or in a launched world of the
// rank's GPU; there all ranks make the same number of runs. If the benchmark is `cold`, L2 is
// emptied before each run of the operation; otherwise it keeps what the run before has left. If it
// is `queued`, runs are queued without waiting for each one. Calls of several ranks are: if each
// run was awaited, a rank's time would include the time until the host of the slowest rank has
// woken up. If it is `in_graph`, both sides are graphs of several runs, for runs that are shorter
// than the host needs to queue one. The product is by cuBLAS, whose absence is an Error
// (unsupported), or where `backend`, of the operation, is cuda with mma.sync (MmaProduct): on
// Hopper its kernels could not be as fast. If the benchmark runs beside products, one of
// 4096 x 4096 x 7168 by cuBLAS is timed alone too, and then both while the other runs all the time
// on a stream of its own.
Measured measure_on_gpu(const std::function<void()>& operation, const testing::Benchmark& benchmark,
                        Backend backend, const BenchOptions& options);

}  // namespace winnow::cli
