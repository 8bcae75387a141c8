// Gradients of compressed rows on the CPU. Each element of d_kv and d_gate has one window that
// writes it. The sums over windows are formed in parts that depend on the shape alone, which are
// added in their order, so that the result does not depend on the number of threads.
#include <algorithm>
#include <cstring>
#include <vector>

#include "winnow/compressor/backward/backward_impl.h"
#include "winnow/compressor/window_cpu.h"
#include "winnow/cpu/convert.h"

namespace winnow::compressor {
namespace {

// The sums of some windows.
template <class Real>
struct Part {
  using Row = typename Window<Real>::Row;
  typename Window<Real>::Slots bias;  // of each slot: [slots, d]
  Row norm_weight;

  explicit Part(const Problem& problem)
      : bias(Window<Real>::Slots::Zero(problem.slots(), problem.d)),
        norm_weight(Row::Zero(problem.d)) {}
};

template <class Real>
struct Scratch {
  Window<Real> window;
  typename Window<Real>::Row row, gradient;

  explicit Scratch(const Problem& problem) : window(problem), row(problem.d), gradient(problem.d) {}
};

// Zeros in the columns from `first` on of some tokens.
void clear(const BackwardParams& params, std::int64_t token, std::int64_t tokens,
           std::int64_t first, std::int64_t count) {
  const auto fill = [&](const Rows<void*>& rows, DType dtype, std::int64_t at) {
    const std::int64_t bytes = size_of(dtype);
    std::memset(static_cast<char*>(rows.data) + (rows.offset(at) + first) * bytes, 0,
                static_cast<std::size_t>(count * bytes));
  };
  for (std::int64_t at = token; at < token + tokens; ++at) {
    fill(params.d_kv, params.d_kv_dtype, at);
    fill(params.d_gate, params.d_gate_dtype, at);
  }
}

// Window w of the sequence.
template <class Real>
void backward_window(const BackwardParams& params, const Sequence& sequence, std::int64_t w,
                     Scratch<Real>& s, Part<Real>& part) {
  const Problem& problem = params.problem;
  const std::int64_t ratio = problem.ratio, d = problem.d, slots = problem.slots();
  const std::int64_t begin = first_slot(problem, w), row = sequence.row + w;
  s.window.load(sequence, w);
  s.window.sum(begin);
  load_real(params.d_rows_dtype, params.d_rows.data, params.d_rows.offset(row), d,
            s.gradient.data());
  Real rstd = 1;
  if (problem.norm_weight != nullptr) {
    load_real(params.rows_dtype, params.rows.data, params.rows.offset(row), d, s.row.data());
    rstd = static_cast<const Real*>(params.rstd)[row];
  }
  s.window.finish_backward(sequence.position + w * ratio, s.row, rstd, s.gradient,
                           part.norm_weight);
  s.window.sum_backward(s.gradient);
  // The first token of the slots: that of the window before where there are two series.
  const std::int64_t token = sequence.token + (w + 1) * ratio - slots;
  for (std::int64_t j = begin; j < slots; ++j) {
    const std::int64_t first = j < ratio ? 0 : d;
    store_real(params.d_kv_dtype, s.window.kv(j), d, params.d_kv.data,
               params.d_kv.offset(token + j) + first);
    store_real(params.d_gate_dtype, s.window.gate(j), d, params.d_gate.data,
               params.d_gate.offset(token + j) + first);
    part.bias.row(j) += Eigen::Map<const typename Window<Real>::Row>(s.window.gate(j), d);
  }
}

template <class Real>
void backward_all(const BackwardParams& params, const Executor& executor) {
  const Problem& problem = params.problem;
  const std::int64_t ratio = problem.ratio, d = problem.d, columns = problem.series() * d;
  const auto sequences = static_cast<std::int64_t>(params.sequences.size());
  executor.for_each_range(sequences, 1, [&](std::int64_t i, std::int64_t, int) {
    const Sequence& sequence = params.sequences[static_cast<std::size_t>(i)];
    const std::int64_t complete = sequence.rows * ratio;
    clear(params, sequence.token + complete, sequence.tokens - complete, 0, columns);
    if (problem.overlap && sequence.rows > 0) {
      clear(params, sequence.token + complete - ratio, ratio, 0, d);
    }
  });

  const std::int64_t rows =
      sequences == 0 ? 0 : params.sequences.back().row + params.sequences.back().rows;
  constexpr std::int64_t kMostParts = 512, kPartBytes = std::int64_t{32} << 20;
  const std::int64_t part_bytes = problem.slots() * d * std::int64_t{sizeof(Real)};
  const std::int64_t parts = std::clamp<std::int64_t>(std::min(kMostParts, kPartBytes / part_bytes),
                                                      1, std::max<std::int64_t>(rows, 1));
  const std::int64_t of_part = (rows + parts - 1) / parts;
  std::vector<Part<Real>> sums(static_cast<std::size_t>(parts), Part<Real>(problem));
  auto scratch = scratch_of_workers<Scratch<Real>>(executor, parts, problem);
  executor.for_each_range(parts, 1, [&](std::int64_t part, std::int64_t, int worker) {
    const std::int64_t begin = part * of_part, end = std::min(begin + of_part, rows);
    if (begin >= end) return;
    auto sequence = sequence_of(params.sequences, begin);
    for (std::int64_t row = begin; row < end && !executor.stopped(); ++row) {
      while (row >= sequence->row + sequence->rows) ++sequence;
      backward_window(params, *sequence, row - sequence->row,
                      scratch[static_cast<std::size_t>(worker)],
                      sums[static_cast<std::size_t>(part)]);
    }
  });

  using Row = typename Window<Real>::Row;
  executor.for_each_range(problem.slots(), 1, [&](std::int64_t j, std::int64_t, int) {
    const auto& to = params.d_position_bias.as<Real>();
    Eigen::Map<Row> bias(to.data + to.offset(j % ratio) + (j < ratio ? 0 : d), d);
    bias = sums[0].bias.row(j);
    for (std::size_t part = 1; part < sums.size(); ++part) bias += sums[part].bias.row(j);
  });
  if (params.d_norm_weight == nullptr) return;
  Eigen::Map<Row> norm_weight(static_cast<Real*>(params.d_norm_weight), d);
  norm_weight = sums[0].norm_weight;
  for (std::size_t part = 1; part < sums.size(); ++part) norm_weight += sums[part].norm_weight;
}

}  // namespace

void backward_cpu(const BackwardParams& params, const Executor& executor) {
  const bool f64 = params.problem.dtype == DType::f64;
  (f64 ? backward_all<double> : backward_all<float>)(params, executor);
}

}  // namespace winnow::compressor
