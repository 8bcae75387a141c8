// Forward on the CPU: for each query, softmax over its blocks of visible rows with a running
// maximum. Of the scratch memory only the list of visible entries grows with topk.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "winnow/sparse_mla/forward/forward_impl.h"
#include "winnow/sparse_mla/gather_cpu.h"

namespace winnow::sparse_mla {
namespace {

template <class Real>
constexpr Real kInfinity = std::numeric_limits<Real>::infinity();

// The state of one query's softmax for a group of heads.
template <class Real>
struct Scratch {
  VisibleEntries visible;
  Matrix<Real> q;        // [heads, d_qk]
  Matrix<Real> rows;     // [kBlock, d_qk]
  Matrix<Real> weights;  // [heads, kBlock]: logits, then exp(logit - maximum)
  Matrix<Real> sum;      // [heads, 512]: weighted values
  Vector<Real> maximum, denominator;

  Scratch(const Problem& problem, Index heads)
      : visible(problem),
        q(heads, problem.d_qk),
        rows(kBlock, problem.d_qk),
        weights(heads, kBlock),
        sum(heads, kValueColumns),
        maximum(heads),
        denominator(heads) {}
};

// Takes `count` gathered rows into the running softmax of `heads` heads.
template <class Real>
void accumulate_block(const Problem& problem, Index heads, Index count, Scratch<Real>& s) {
  const auto scale = static_cast<Real>(problem.scale);
  auto weights = s.weights.topLeftCorner(heads, count);
  const auto rows = s.rows.topRows(count);
  weights.noalias() = s.q.topRows(heads) * rows.transpose();
  for (Index h = 0; h < heads; ++h) {
    auto weight = weights.row(h).array();
    weight *= scale;
    const Real before = s.maximum[h];
    const Real block = weight.template maxCoeff<Eigen::PropagateNaN>();
    const Real maximum = std::isnan(before) || before > block ? before : block;  // NaN stays
    if (maximum == -kInfinity<Real>) {  // all logits so far are -inf: nothing to weigh
      weight.setZero();
      continue;
    }
    const Real rescale = std::exp(before - maximum);
    weight = exp_of(weight - maximum);
    s.denominator[h] = s.denominator[h] * rescale + weight.sum();
    if (rescale != Real(1)) s.sum.row(h) *= rescale;
    s.maximum[h] = maximum;
  }
  s.sum.topRows(heads).noalias() += weights * rows.leftCols(kValueColumns);
}

// Divides by the denominator, the sink included, and stores the results of one head.
template <class Real>
void finish_head(const ForwardParams& params, std::int64_t i, std::int64_t head, Index h,
                 Scratch<Real>& s) {
  const auto attn_sink = params.attn_sink.as<const Real>();
  const auto lse_out = params.lse.as<Real>(), max_logits = params.max_logits.as<Real>();
  // An infinite maximum is the sum's logarithm; of a NaN among the logits the maximum is NaN.
  const Real lse =
      std::isinf(s.maximum[h]) ? s.maximum[h] : s.maximum[h] + std::log(s.denominator[h]);
  const Real sink =
      attn_sink.data == nullptr ? -kInfinity<Real> : attn_sink.data[attn_sink.offset(head)];
  auto sum = s.sum.row(h);
  if (lse == -kInfinity<Real> || sink == kInfinity<Real>) {
    sum.setZero();
  } else {
    // exp(-lse') with both parts taken relative to the maximum, so that neither overflows.
    const Real shift = std::max(s.maximum[h], sink);
    const Real shrink = std::exp(s.maximum[h] - shift);
    sum *= shrink / (s.denominator[h] * shrink + std::exp(sink - shift));
  }
  store_real(params.problem.dtype, sum.data(), kValueColumns, params.out.data,
             params.out.offset(i, head));
  if (lse_out.data != nullptr) lse_out.data[lse_out.offset(i) + head] = lse;
  if (max_logits.data != nullptr) max_logits.data[max_logits.offset(i) + head] = s.maximum[h];
}

template <class Real>
void forward_query(const ForwardParams& params, std::int64_t i, std::int64_t first, Index heads,
                   Scratch<Real>& s) {
  const Problem& problem = params.problem;
  s.visible.find(problem, i);
  load_heads(problem.dtype, problem.q, i, first, heads, problem.d_qk, s.q);
  s.sum.setZero();
  s.maximum.setConstant(-kInfinity<Real>);
  s.denominator.setZero();
  for (Index begin = 0; begin < s.visible.count; begin += kBlock) {
    const Index count = std::min(kBlock, s.visible.count - begin);
    gather_rows(problem, s.visible.row.data() + begin, count, s.rows);
    accumulate_block(problem, heads, count, s);
  }
  for (Index h = 0; h < heads; ++h) finish_head(params, i, first + h, h, s);
}

// Heads of one work item: all of them, fewer where there are more threads than queries.
std::int64_t heads_per_item(const Problem& problem, int workers) {
  constexpr std::int64_t kFewest = 8;  // below that the gathered rows cost more than they serve
  const std::int64_t groups = (workers + problem.s_q - 1) / problem.s_q;
  return std::clamp((problem.h_q + groups - 1) / groups, std::min(kFewest, problem.h_q),
                    problem.h_q);
}

template <class Real>
void forward_all(const ForwardParams& params, const Executor& executor) {
  const Problem& problem = params.problem;
  const std::int64_t heads = heads_per_item(problem, executor.workers());
  const std::int64_t groups = (problem.h_q + heads - 1) / heads;
  std::vector<Scratch<Real>> scratch(static_cast<std::size_t>(executor.workers()),
                                     Scratch<Real>(problem, heads));
  executor.for_each_range(
      problem.s_q * groups, 1, [&](std::int64_t item, std::int64_t, int worker) {
        const std::int64_t first = item % groups * heads;
        forward_query(params, item / groups, first, std::min(heads, problem.h_q - first),
                      scratch[static_cast<std::size_t>(worker)]);
      });
}

}  // namespace

void forward_cpu(const ForwardParams& params, const Executor& executor) {
  (params.problem.dtype == DType::f64 ? forward_all<double> : forward_all<float>)(params, executor);
}

}  // namespace winnow::sparse_mla
