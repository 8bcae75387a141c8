// The attention distribution on the CPU: all heads of a query against a block of its visible rows,
// summed over the heads.
#include <algorithm>

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

// What an entry of query i gets.
template <class Real>
struct Sums {
  std::int64_t topk, extra_topk;
  Real *attn_sum, *extra_attn_sum;

  Sums(const DistributionParams& params, std::int64_t i)
      : topk(params.problem.topk),
        extra_topk(params.problem.extra.topk),
        attn_sum(params.attn_sum.as<Real>().data + params.attn_sum.offset(i)),
        extra_attn_sum(params.extra_attn_sum.as<Real>().data + params.extra_attn_sum.offset(i)) {}

  Real& operator[](std::int64_t entry) const {
    return entry < topk ? attn_sum[entry] : extra_attn_sum[entry - topk];
  }
  void clear() const {
    std::fill_n(attn_sum, topk, Real(0));
    std::fill_n(extra_attn_sum, extra_topk, Real(0));
  }
};

template <class Real>
void distribution_query(const DistributionParams& params, std::int64_t i, Scratch<Real>& s,
                        const Executor& executor) {
  const Problem& problem = params.problem;
  const auto scale = static_cast<Real>(problem.scale);
  const Sums<Real> attn_sum(params, i);
  attn_sum.clear();
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
    for (std::int64_t i = 0; i < params.problem.s_q; ++i) Sums<Real>(params, i).clear();
    return;
  }
  auto scratch = scratch_of_workers<Scratch<Real>>(executor, params.problem.s_q, params.problem);
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
