// Backward on the CPU, without atomics: a tile of queries at a time, first each query writes what
// it gives to each of its rows, then every row of dkv and dextra_kv adds up its contributions in
// the order of the queries. The result does not depend on the number of threads.
#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "winnow/sparse_mla/backward/backward_impl.h"
#include "winnow/sparse_mla/gather_cpu.h"

namespace winnow::sparse_mla {
namespace {

template <class Real>
constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
constexpr std::int64_t kTileBytes = std::int64_t{64} << 20;

// One worker's space for one query.
template <class Real>
struct Scratch {
  Matrix<Real> q, d_out, dq;  // [h_q, d_qk], [h_q, 512], [h_q, d_qk]
  Matrix<Real> rows;          // [kBlock, d_qk]
  Matrix<Real> p, ds;         // [h_q, kBlock]
  Vector<Real> lse, delta;    // [h_q]; lse with the sink
  Vector<Real> out;           // [512]

  explicit Scratch(const Problem& problem)
      : q(problem.h_q, problem.d_qk),
        d_out(problem.h_q, kValueColumns),
        dq(problem.h_q, problem.d_qk),
        rows(kBlock, problem.d_qk),
        p(problem.h_q, kBlock),
        ds(problem.h_q, kBlock),
        lse(problem.h_q),
        delta(problem.h_q),
        out(kValueColumns) {}
};

// The queries that are worked on between two reductions into dkv.
template <class Real>
struct Tile {
  std::int64_t queries;
  std::vector<VisibleEntries> visible;
  // [queries * all_entries, d_qk]: what each visible entry adds to its row of dkv or dextra_kv.
  Matrix<Real> contributions;
  Matrix<Real> d_sink;  // [queries, h_q]

  Tile(const Problem& problem, int workers)
      : queries(size(problem, workers)),
        visible(static_cast<std::size_t>(queries), VisibleEntries(problem)),
        contributions(queries * problem.all_entries(), problem.d_qk),
        d_sink(queries, problem.h_q) {}

  static std::int64_t size(const Problem& problem, int workers) {
    const std::int64_t bytes = std::max<std::int64_t>(problem.all_entries() * problem.d_qk, 1) *
                               std::int64_t{sizeof(Real)};
    // At least a query per worker; more of them where memory allows, to even out the work.
    const std::int64_t queries =
        std::clamp<std::int64_t>(kTileBytes / bytes, workers, 64 * std::int64_t{workers});
    return std::min(queries, problem.s_q);
  }
};

// log(exp(a) + exp(b)); NaN if either is.
template <class Real>
Real log_add_exp(Real a, Real b) {
  if (a == b) return a + std::log(Real(2));  // also where both are infinite
  return std::max(a, b) + std::log1p(std::exp(-std::abs(a - b)));
}

template <class Real>
bool infinite_sink(const Rows<const Real*>& attn_sink, Index h) {
  return attn_sink.present() && attn_sink.data[attn_sink.offset(h)] == kInfinity<Real>;
}

// Loads a query and what the formulas need of each head: lse' and delta.
template <class Real>
void load_query(const BackwardParams& params, std::int64_t i, Scratch<Real>& s) {
  const Problem& problem = params.problem;
  const auto lse = params.lse.as<const Real>(), delta = params.delta.as<const Real>();
  const auto attn_sink = params.attn_sink.as<const Real>();
  load_heads(problem.dtype, problem.q, i, 0, problem.h_q, problem.d_qk, s.q);
  load_heads(problem.dtype, params.d_out, i, 0, problem.h_q, kValueColumns, s.d_out);
  for (Index h = 0; h < problem.h_q; ++h) {
    if (infinite_sink(attn_sink, h)) {  // gives exactly nothing, whatever its values are
      s.q.row(h).setZero();
      s.d_out.row(h).setZero();
    }
    s.lse[h] = lse.data[lse.offset(i) + h];
    if (attn_sink.present()) {
      s.lse[h] = log_add_exp(s.lse[h], attn_sink.data[attn_sink.offset(h)]);
    }
    if (delta.present()) {
      s.delta[h] = delta.data[delta.offset(i) + h];
    } else {
      load_real(problem.dtype, params.out.data, params.out.offset(i, h), kValueColumns,
                s.out.data());
      s.delta[h] = s.out.dot(s.d_out.row(h));
    }
  }
}

// P and dS of the gathered rows.
template <class Real>
void weights_of_block(const BackwardParams& params, Index count, Scratch<Real>& s) {
  const Problem& problem = params.problem;
  const auto scale = static_cast<Real>(problem.scale);
  const auto attn_sink = params.attn_sink.as<const Real>();
  auto p = s.p.leftCols(count), ds = s.ds.leftCols(count);
  const auto rows = s.rows.topRows(count);
  p.noalias() = s.q * rows.transpose();
  ds.noalias() = s.d_out * rows.leftCols(kValueColumns).transpose();
  for (Index h = 0; h < problem.h_q; ++h) {
    if (infinite_sink(attn_sink, h)) {
      p.row(h).setZero();
      ds.row(h).setZero();
      continue;
    }
    p.row(h) = exp_of(p.row(h).array() * scale - s.lse[h]);
    ds.row(h).array() = p.row(h).array() * (ds.row(h).array() - s.delta[h]) * scale;
  }
}

// dq and d_sink of query i, and its contributions to the rows it sees.
template <class Real>
void backward_query(const BackwardParams& params, std::int64_t i, std::int64_t slot,
                    Tile<Real>& tile, Scratch<Real>& s, const Executor& executor) {
  const Problem& problem = params.problem;
  const auto attn_sink = params.attn_sink.as<const Real>();
  VisibleEntries& visible = tile.visible[static_cast<std::size_t>(slot)];
  visible.find(problem, i);
  load_query(params, i, s);
  s.dq.setZero();
  for (Index begin = 0; begin < visible.count && !executor.stopped(); begin += kBlock) {
    const Index count = std::min(kBlock, visible.count - begin);
    gather_rows(problem, visible.row.data() + begin, count, s.rows);
    weights_of_block(params, count, s);
    const auto p = s.p.leftCols(count), ds = s.ds.leftCols(count);
    s.dq.noalias() += ds * s.rows.topRows(count);
    auto contributions = tile.contributions.middleRows(slot * problem.all_entries() + begin, count);
    contributions.noalias() = ds.transpose() * s.q;
    contributions.leftCols(kValueColumns).noalias() += p.transpose() * s.d_out;
  }
  for (Index h = 0; h < problem.h_q; ++h) {
    const bool zero = infinite_sink(attn_sink, h);
    if (zero) s.dq.row(h).setZero();  // also where a row holds NaN
    store_real(params.dq_dtype, s.dq.row(h).data(), problem.d_qk, params.dq.data,
               params.dq.offset(i, h));
    if (params.d_sink.present()) {
      const Real sink = attn_sink.data[attn_sink.offset(h)];
      const bool without_share = zero || sink == -kInfinity<Real> || visible.count == 0;
      tile.d_sink(slot, h) = without_share ? Real(0) : -std::exp(sink - s.lse[h]) * s.delta[h];
    }
  }
}

// The gradient of one source while it is added up: the output itself where that is of the same
// type.
template <class Real>
struct Accumulator {
  DType dtype;
  Rows<void*> to;
  std::int64_t rows, columns;
  Matrix<Real> own;
  Real* data;
  std::int64_t stride;

  Accumulator(DType given, const Rows<void*>& output, std::int64_t count, std::int64_t width)
      : dtype(given), to(output), rows(count), columns(width) {
    if (dtype == dtype_of<Real>) {
      data = static_cast<Real*>(to.data);
      stride = to.stride0;
    } else {
      own.resize(rows, columns);
      data = own.data();
      stride = columns;
    }
  }
  Eigen::Map<Eigen::Matrix<Real, 1, Eigen::Dynamic>> row(std::int64_t t) const {
    return {data + t * stride, columns};
  }
  void clear(const Executor& executor) const {
    executor.for_each_range(rows, kRowGrain, [&](std::int64_t t, std::int64_t end, int) {
      for (; t < end; ++t) row(t).setZero();
    });
  }
  void store(const Executor& executor) const {
    if (dtype == dtype_of<Real>) return;
    executor.for_each_range(rows, kRowGrain, [&](std::int64_t t, std::int64_t end, int) {
      for (; t < end; ++t) store_real(dtype, row(t).data(), columns, to.data, to.offset(t));
    });
  }

 private:
  static constexpr std::int64_t kRowGrain = 256;
};

// Those of both sources, with their rows numbered on.
template <class Real>
struct RowGradients {
  Accumulator<Real> dkv, dextra_kv;

  explicit RowGradients(const BackwardParams& params)
      : dkv(params.dkv_dtype, params.dkv, params.problem.s_kv, params.problem.d_qk),
        dextra_kv(params.dextra_kv_dtype, params.dextra_kv, params.problem.extra.s_kv,
                  params.problem.d_qk) {}
  auto row(std::int64_t t) const { return t < dkv.rows ? dkv.row(t) : dextra_kv.row(t - dkv.rows); }
};

template <class Real>
void reduce_tile(const Problem& problem, const Tile<Real>& tile, std::int64_t queries,
                 const RowGradients<Real>& gradients, const Executor& executor) {
  // Each part owns the rows of one remainder, so that neighbouring hot rows spread over the parts.
  const std::int64_t parts = executor.workers();
  executor.for_each_range(parts, 1, [&](std::int64_t part, std::int64_t, int) {
    for (std::int64_t slot = 0; slot < queries; ++slot) {
      const VisibleEntries& visible = tile.visible[static_cast<std::size_t>(slot)];
      for (Index r = 0; r < visible.count; ++r) {
        if (r % kBlock == 0 && executor.stopped()) return;
        const std::int64_t t = visible.row[static_cast<std::size_t>(r)];
        if (t % parts != part) continue;
        gradients.row(t) += tile.contributions.row(slot * problem.all_entries() + r);
      }
    }
  });
}

// Takes all queries into dq, the gradients of the rows and d_sink, a tile at a time.
template <class Real>
void add_queries(const BackwardParams& params, Tile<Real>& tile,
                 std::vector<Scratch<Real>>& scratch, const RowGradients<Real>& gradients,
                 Eigen::VectorXd& d_sink, const Executor& executor) {
  const Problem& problem = params.problem;
  for (std::int64_t first = 0; first < problem.s_q; first += tile.queries) {
    const std::int64_t queries = std::min(tile.queries, problem.s_q - first);
    executor.for_each_range(queries, 1, [&](std::int64_t slot, std::int64_t, int worker) {
      backward_query(params, first + slot, slot, tile, scratch[static_cast<std::size_t>(worker)],
                     executor);
    });
    reduce_tile(problem, tile, queries, gradients, executor);
    if (params.d_sink.present()) {
      for (std::int64_t slot = 0; slot < queries; ++slot) {
        d_sink += tile.d_sink.row(slot).transpose().template cast<double>();
      }
    }
  }
}

template <class Real>
void backward_all(const BackwardParams& params, const Executor& executor) {
  const Problem& problem = params.problem;
  // All memory is had before anything is written.
  const bool queries = problem.s_q > 0 && problem.h_q > 0;
  const RowGradients<Real> gradients(params);
  Eigen::VectorXd d_sink = Eigen::VectorXd::Zero(params.d_sink.present() ? problem.h_q : 0);
  std::optional<Tile<Real>> tile;
  std::vector<Scratch<Real>> scratch;
  if (queries) {
    tile.emplace(problem, executor.workers());
    scratch = scratch_of_workers<Scratch<Real>>(executor, tile->queries, problem);
  }
  gradients.dkv.clear(executor);
  gradients.dextra_kv.clear(executor);
  if (queries) add_queries(params, *tile, scratch, gradients, d_sink, executor);
  gradients.dkv.store(executor);
  gradients.dextra_kv.store(executor);
  for (Index h = 0; h < d_sink.size(); ++h) {
    params.d_sink.as<Real>().data[params.d_sink.offset(h)] = static_cast<Real>(d_sink[h]);
  }
}

}  // namespace

void backward_cpu(const BackwardParams& params, const Executor& executor) {
  const bool f64 = params.problem.dtype == DType::f64;
  (f64 ? backward_all<double> : backward_all<float>)(params, executor);
}

}  // namespace winnow::sparse_mla
