// Forward on the CPU: for each query, softmax over its blocks of visible rows with a running
// maximum. Of the scratch memory only the list of visible entries grows with topk.
#include <algorithm>

#include "winnow/sparse_mla/forward/forward_impl.h"
#include "winnow/sparse_mla/gather_cpu.h"
#include "winnow/sparse_mla/softmax_cpu.h"

namespace winnow::sparse_mla {
namespace {

template <class Real>
struct Scratch : RunningSoftmax<Real> {
  VisibleEntries visible;

  Scratch(const Problem& problem, Index heads)
      : RunningSoftmax<Real>(heads, problem.d_qk), visible(problem) {}
};

// Finishes one head and stores its results.
template <class Real>
void store_head(const ForwardParams& params, std::int64_t i, std::int64_t head, Index h,
                Scratch<Real>& s) {
  const auto attn_sink = params.attn_sink.as<const Real>();
  const auto lse_out = params.lse.as<Real>(), max_logits = params.max_logits.as<Real>();
  const Real lse =
      s.finish(h, attn_sink.present() ? attn_sink.data[attn_sink.offset(head)] : -s.kInfinity,
               params.lse_of_nothing);
  store_real(params.problem.dtype, s.sum.row(h).data(), kValueColumns, params.out.data,
             params.out.offset(i, head));
  if (lse_out.present()) lse_out.data[lse_out.offset(i) + head] = lse;
  if (max_logits.present()) max_logits.data[max_logits.offset(i) + head] = s.maximum[h];
}

template <class Real>
void forward_query(const ForwardParams& params, std::int64_t i, std::int64_t first, Index heads,
                   Scratch<Real>& s, const Executor& executor) {
  const Problem& problem = params.problem;
  s.visible.find(problem, i);
  load_heads(problem.dtype, problem.q, i, first, heads, problem.d_qk, s.q);
  s.reset();
  for (Index begin = 0; begin < s.visible.count && !executor.stopped(); begin += kBlock) {
    const Index count = std::min(kBlock, s.visible.count - begin);
    gather_rows(problem, s.visible.row.data() + begin, count, s.rows);
    s.accumulate(heads, count, static_cast<Real>(problem.scale));
  }
  for (Index h = 0; h < heads; ++h) store_head(params, i, first + h, h, s);
}

// All heads are one work item; several where there are more threads than queries.
HeadItems items_of(const Problem& problem, int workers) {
  const std::int64_t items = (workers + problem.s_q - 1) / problem.s_q;
  return {problem.h_q, (problem.h_q + items - 1) / items + HeadItems::kLeast - 1};
}

template <class Real>
void forward_all(const ForwardParams& params, const Executor& executor) {
  const Problem& problem = params.problem;
  const HeadItems items = items_of(problem, executor.workers());
  const std::int64_t ranges = problem.s_q * items.count;
  auto scratch = scratch_of_workers<Scratch<Real>>(executor, ranges, problem, items.most());
  executor.for_each_range(ranges, 1, [&](std::int64_t item, std::int64_t, int worker) {
    const Index part = item % items.count;
    forward_query(params, item / items.count, items.first(part), items.size(part),
                  scratch[static_cast<std::size_t>(worker)], executor);
  });
}

}  // namespace

void forward_cpu(const ForwardParams& params, const Executor& executor) {
  (params.problem.dtype == DType::f64 ? forward_all<double> : forward_all<float>)(params, executor);
}

}  // namespace winnow::sparse_mla
