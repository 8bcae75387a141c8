// The attention distribution on the CPU: all heads of a query against a block of its visible rows,
// summed over the heads.
#include <algorithm>
#include <vector>

#include "winnow/sparse_mla/distribution/distribution_impl.h"
#include "winnow/sparse_mla/gather_cpu.h"

namespace winnow::sparse_mla {
namespace {

template <class Real>
struct Scratch {
  VisibleEntries visible;
  Matrix<Real> q;        // [h_q, d_qk]
  Matrix<Real> rows;     // [kBlock, d_qk]
  Matrix<Real> weights;  // [h_q, kBlock]

  explicit Scratch(const Problem& problem)
      : visible(problem),
        q(problem.h_q, problem.d_qk),
        rows(kBlock, problem.d_qk),
        weights(problem.h_q, kBlock) {}
};

template <class Real>
void distribution_query(const DistributionParams& params, std::int64_t i, Scratch<Real>& s,
                        const Executor& executor) {
  const Problem& problem = params.problem;
  const auto scale = static_cast<Real>(problem.scale);
  Real* attn_sum = params.attn_sum.as<Real>().data + params.attn_sum.offset(i);
  std::fill_n(attn_sum, problem.topk, Real(0));
  s.visible.find(problem, i);
  load_heads(problem.dtype, problem.q, i, 0, problem.h_q, problem.d_qk, s.q);
  const Eigen::Map<const Vector<Real>> lse(params.lse.as<const Real>().data + params.lse.offset(i),
                                           problem.h_q);

  for (Index begin = 0; begin < s.visible.count && !executor.stopped(); begin += kBlock) {
    const Index count = std::min(kBlock, s.visible.count - begin);
    gather_rows(problem, s.visible.row.data() + begin, count, s.rows);
    auto weights = s.weights.leftCols(count);
    weights.noalias() = s.q * s.rows.topRows(count).transpose();
    for (Index h = 0; h < problem.h_q; ++h) {
      weights.row(h) = exp_of(weights.row(h).array() * scale - lse[h]);
    }
    // One row holds the sum before it is scattered: adding rows is faster than adding columns.
    auto sum = weights.row(0);
    for (Index h = 1; h < problem.h_q; ++h) sum += weights.row(h);
    for (Index r = 0; r < count; ++r) {
      attn_sum[s.visible.entry[static_cast<std::size_t>(begin + r)]] = sum[r];
    }
  }
}

template <class Real>
void distribution_all(const DistributionParams& params, const Executor& executor) {
  if (params.problem.h_q == 0) {
    for (std::int64_t i = 0; i < params.problem.s_q; ++i) {
      std::fill_n(params.attn_sum.as<Real>().data + params.attn_sum.offset(i), params.problem.topk,
                  Real(0));
    }
    return;
  }
  auto scratch = scratch_of_workers<Scratch<Real>>(executor, params.problem);
  executor.for_each_range(params.problem.s_q, 1, [&](std::int64_t i, std::int64_t, int worker) {
    distribution_query(params, i, scratch[static_cast<std::size_t>(worker)], executor);
  });
}

}  // namespace

void distribution_cpu(const DistributionParams& params, const Executor& executor) {
  const bool f64 = params.problem.dtype == DType::f64;
  (f64 ? distribution_all<double> : distribution_all<float>)(params, executor);
}

}  // namespace winnow::sparse_mla
