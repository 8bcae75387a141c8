// Steps on the CPU: first all windows that are complete, from the state and the new tokens; then
// the new tokens take their places in the state.
#include <algorithm>
#include <type_traits>

#include "winnow/cache/write_row_cpu.h"
#include "winnow/compressor/step/step_impl.h"
#include "winnow/compressor/window_cpu.h"
#include "winnow/cpu/convert.h"

namespace winnow::compressor {
namespace {

// Where the state has kv of the token at that position; the gate, with the bias, comes after it.
template <class Real>
Real* place_of(const StepParams& params, const Sequence& sequence, std::int64_t position) {
  const auto& state = params.state.as<Real>();
  return state.data + state.offset(sequence.state, position % params.ring);
}

// Fills the slots of window w from `first` on.
template <class Real>
void load(const StepParams& params, const Sequence& sequence, std::int64_t w, std::int64_t first,
          Window<Real>& window) {
  const Problem& problem = params.problem;
  const std::int64_t ratio = problem.ratio, d = problem.d, columns = problem.series() * d;
  const std::int64_t begin = (w + 1) * ratio - problem.slots();  // the position of slot 0
  for (std::int64_t j = first; j < problem.slots(); ++j) {
    const std::int64_t position = begin + j, column = j < ratio ? 0 : d;
    if (position >= sequence.position) {
      window.load_token(sequence.token + position - sequence.position, j % ratio, column, d,
                        window.kv(j), window.gate(j));
      continue;
    }
    const Real* place = place_of<Real>(params, sequence, position);
    std::copy_n(place + column, d, window.kv(j));
    std::copy_n(place + columns + column, d, window.gate(j));
  }
}

// Writes the row of a token into the cache or the pages, if there are any.
void store(const StepParams& params, const float* finished, std::int64_t token) {
  const bool cached = params.cache.present();
  if (!cached && !params.pages.present()) return;
  // Another thread may have changed the slot since it was checked.
  const std::int64_t slot = params.slots[token], d = params.problem.d;
  if (!(cached ? params.cache.holds(slot) : params.pages.holds(slot))) return;
  alignas(float) std::uint8_t rounded[kMostColumns * sizeof(float)] = {};
  float row[kMostColumns];
  store_f32(params.rows_dtype, finished, d, rounded, 0);
  load_f32(params.rows_dtype, rounded, 0, d, row);
  if (cached) {
    store_f32(DType::bf16, row, d, rounded, 0);
    cache::write_latent_row(params.cache, rounded, slot);
  } else {
    cache::write_key_row(params.pages, row, slot);
  }
}

template <class Real>
void step_all(const StepParams& params, const Executor& executor) {
  const Problem& problem = params.problem;
  const std::int64_t ratio = problem.ratio, columns = problem.series() * problem.d;
  const std::int64_t rows = params.sequences.back().row + params.sequences.back().rows;
  const std::int64_t grain = kMostRatio / ratio + 1;
  const auto sequences = static_cast<std::int64_t>(params.sequences.size());
  auto windows = scratch_of_workers<Window<Real>>(
      executor, std::max((rows + grain - 1) / grain, sequences), problem);
  executor.for_each_range(rows, grain, [&](std::int64_t begin, std::int64_t end, int worker) {
    Window<Real>& window = windows[static_cast<std::size_t>(worker)];
    auto sequence = sequence_of(params.sequences, begin);
    for (std::int64_t row = begin; row < end; ++row) {
      while (row >= sequence->row + sequence->rows) ++sequence;
      const std::int64_t w = sequence->position / ratio + row - sequence->row;
      const std::int64_t first = first_slot(problem, w);
      load(params, *sequence, w, first, window);
      window.sum(first);
      const std::int64_t token = sequence->token + (w + 1) * ratio - 1 - sequence->position;
      const Real* finished = window.finish(w * ratio).data();
      if (params.rows.present()) {
        store_real(params.rows_dtype, finished, problem.d, params.rows.data,
                   params.rows.offset(token));
      }
      if constexpr (std::is_same_v<Real, float>) store(params, finished, token);
    }
  });
  executor.for_each_range(sequences, 1, [&](std::int64_t i, std::int64_t, int worker) {
    const Sequence& sequence = params.sequences[static_cast<std::size_t>(i)];
    if (sequence.state < 0) return;
    for (std::int64_t t = std::max<std::int64_t>(sequence.tokens - params.ring, 0);
         t < sequence.tokens; ++t) {
      const std::int64_t position = sequence.position + t;
      Real* place = place_of<Real>(params, sequence, position);
      windows[static_cast<std::size_t>(worker)].load_token(sequence.token + t, position % ratio, 0,
                                                           columns, place, place + columns);
    }
  });
}

}  // namespace

void step_cpu(const StepParams& params, const Executor& executor) {
  const bool f64 = params.problem.dtype == DType::f64;
  (f64 ? step_all<double> : step_all<float>)(params, executor);
}

}  // namespace winnow::compressor
