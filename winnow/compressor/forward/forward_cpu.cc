// Compressed rows on the CPU: a work item is some rows.

#include "winnow/compressor/forward/forward_impl.h"
#include "winnow/compressor/window_cpu.h"
#include "winnow/cpu/convert.h"

namespace winnow::compressor {
namespace {

template <class Real>
void forward_all(const ForwardParams& params, const Executor& executor) {
  const Problem& problem = params.problem;
  const std::int64_t rows = params.sequences.back().row + params.sequences.back().rows;
  const std::int64_t grain = kMostRatio / problem.ratio + 1;  // some microseconds
  auto windows = scratch_of_workers<Window<Real>>(executor, (rows + grain - 1) / grain, problem);
  executor.for_each_range(rows, grain, [&](std::int64_t begin, std::int64_t end, int worker) {
    Window<Real>& window = windows[static_cast<std::size_t>(worker)];
    auto sequence = sequence_of(params.sequences, begin);
    for (std::int64_t row = begin; row < end; ++row) {
      while (row >= sequence->row + sequence->rows) ++sequence;
      const std::int64_t w = row - sequence->row;
      window.load(*sequence, w);
      window.sum(first_slot(problem, w));
      store_real(params.rows_dtype, window.finish(sequence->position + w * problem.ratio).data(),
                 problem.d, params.rows.data, params.rows.offset(row));
      if (params.rstd != nullptr) static_cast<Real*>(params.rstd)[row] = window.rstd();
    }
  });
}

}  // namespace

void forward_cpu(const ForwardParams& params, const Executor& executor) {
  const bool f64 = params.problem.dtype == DType::f64;
  (f64 ? forward_all<double> : forward_all<float>)(params, executor);
}

}  // namespace winnow::compressor
