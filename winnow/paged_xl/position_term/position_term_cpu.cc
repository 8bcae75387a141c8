// The position term on the CPU: one work item is one head and one split of one sequence's context.

#include <Eigen/Core>

#include "winnow/paged_xl/position_term/position_term_impl.h"
#include "winnow/paged_xl/relative_cpu.h"

namespace winnow::paged_xl {
namespace {

template <class Real>
void position_term_all(const PositionTermParams& params, const Executor& executor) {
  const std::int64_t head_size = params.head_size;
  const Splits splits(params.context_lens, params.num_seqs, params.max_context);
  const std::int64_t ranges = params.num_heads * splits.count();
  // Per worker: eight rows of r, the query, the results.
  using Array = Eigen::Array<Real, Eigen::Dynamic, 1>;
  auto scratch = scratch_of_workers<Array>(executor, ranges, 9 * head_size + kSplit);
  executor.for_each_range(ranges, 1, [&](std::int64_t item, std::int64_t, int worker) {
    // Heads outermost: the sequences of a step read the same rows of r one after the other.
    const std::int64_t h = item / splits.count();
    const auto& [s, begin, end, context_len] =
        splits.all[static_cast<std::size_t>(item % splits.count())];
    Real* rows = scratch[static_cast<std::size_t>(worker)].data();
    Real* q_v = rows + 8 * head_size;
    Real* results = q_v + head_size;
    biased_query(params.dtype, params.query, params.pos_bias_v, s, h, head_size, rows, q_v);
    relative_logits(params.dtype, params.r, h, context_len, begin, end, q_v, head_size, rows,
                    results);
    store_real(params.matrix_bd_dtype, results, end - begin, params.matrix_bd.data,
               params.matrix_bd.offset(s, h) + begin);
  });
}

}  // namespace

void position_term_cpu(const PositionTermParams& params, const Executor& executor) {
  const bool f64 = params.dtype == DType::f64;
  (f64 ? position_term_all<double> : position_term_all<float>)(params, executor);
}

}  // namespace winnow::paged_xl
