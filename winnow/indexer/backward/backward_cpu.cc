// Backward on the CPU, without atomics: some queries and some columns of d_scores at a time, first
// each query writes what it gives to each of its rows, then every row of dk adds up its
// contributions in the order of the queries. The result does not depend on the number of threads.
#include <algorithm>
#include <cstdint>
#include <vector>

#include <Eigen/Core>

#include "winnow/core/read_once.h"
#include "winnow/cpu/convert.h"
#include "winnow/indexer/backward/backward_impl.h"

namespace winnow::indexer {
namespace {

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Index = Eigen::Index;

// Both are constants, so that the order of the sums is always the same.
constexpr std::int64_t kTileQueries = 32;
constexpr std::int64_t kTileColumns = 1024;  // of d_scores
constexpr Index kBlock = 256;                // rows that are multiplied at once

// What a query of the tile has of its own.
struct Slot {
  std::vector<std::int64_t> row;  // of the visible entries among the tile's columns
  std::vector<float> d_score;     // with the scale of the row
  Matrix contributions;           // [kTileColumns, d]
  Matrix dq;                      // [h, d]
  Eigen::VectorXf d_weights;      // [h]

  explicit Slot(const Problem& problem)
      : contributions(kTileColumns, problem.d), dq(problem.h, problem.d), d_weights(problem.h) {
    row.reserve(kTileColumns);
    d_score.reserve(kTileColumns);
  }
};

// One worker's space for one query.
struct Scratch {
  Matrix q, keys;      // [h, d], [kBlock, d]
  Matrix dots, d_dot;  // [h, kBlock]
  Eigen::VectorXf weights;

  explicit Scratch(const Problem& problem)
      : q(problem.h, problem.d),
        keys(kBlock, problem.d),
        dots(problem.h, kBlock),
        d_dot(problem.h, kBlock),
        weights(problem.h) {}
};

// The visible entries among columns [first, end) of query i.
void find_entries(const BackwardParams& params, std::int64_t i, std::int64_t first,
                  std::int64_t end, Slot& slot) {
  const Problem& problem = params.problem;
  const RowRange visible = problem.visible_rows(i);
  slot.row.clear();
  slot.d_score.clear();
  const auto add = [&](std::int64_t column, std::int64_t row) {
    if (row < visible.begin || row >= visible.end) return;
    float d_score = params.d_scores.data[params.d_scores.offset(i) + column];
    if (problem.k_scale.present()) {
      d_score *= problem.k_scale.data[problem.k_scale.offset(row)];
    }
    slot.row.push_back(row);
    slot.d_score.push_back(d_score);
  };
  if (!params.indices.present()) {
    const std::int64_t last = std::min(end, visible.end);
    for (std::int64_t t = std::max(first, visible.begin); t < last; ++t) add(t, t);
  } else {
    const std::int32_t* const indices = params.indices.data + params.indices.offset(i);
    for (std::int64_t j = first; j < end; ++j) add(j, read_once(indices + j));
  }
}

// Adds the slot's entries to its dq and d_weights, and forms their contributions to dk.
void differentiate(const BackwardParams& params, std::int64_t i, Slot& slot, Scratch& s) {
  const Problem& problem = params.problem;
  for (std::int64_t h = 0; h < problem.h; ++h) {
    load_f32(problem.dtype, problem.q.data, problem.q.offset(i, h), problem.d, s.q.row(h).data());
  }
  load_f32(problem.weights_dtype, problem.weights.data, problem.weights.offset(i), problem.h,
           s.weights.data());
  const auto entries = static_cast<Index>(slot.row.size());
  for (Index begin = 0; begin < entries; begin += kBlock) {
    const Index count = std::min(kBlock, entries - begin);
    for (Index r = 0; r < count; ++r) {
      const std::int64_t t = slot.row[static_cast<std::size_t>(begin + r)];
      load_f32(problem.dtype, problem.k.data, problem.k.offset(t), problem.d, s.keys.row(r).data());
    }
    const auto keys = s.keys.topRows(count);
    auto dots = s.dots.leftCols(count), d_dot = s.d_dot.leftCols(count);
    dots.noalias() = s.q * keys.transpose();
    const float* const d_score = slot.d_score.data() + begin;
    for (Index h = 0; h < problem.h; ++h) {
      const float weight = s.weights[h];
      const float* const dot = s.dots.row(h).data();
      float* const to = s.d_dot.row(h).data();
      float sum = 0.0f;
      for (Index r = 0; r < count; ++r) {
        to[r] = dot[r] > 0.0f ? d_score[r] * weight : 0.0f;
        sum += d_score[r] * (dot[r] <= 0.0f ? 0.0f : dot[r]);  // NaN stays
      }
      slot.d_weights[h] += sum;
    }
    slot.dq.noalias() += d_dot * keys;
    slot.contributions.middleRows(begin, count).noalias() = d_dot.transpose() * s.q;
  }
}

// dk in f32 while it is added up: the output itself where that is f32.
struct Accumulator {
  Matrix own;
  float* data;
  std::int64_t stride;

  explicit Accumulator(const BackwardParams& params) {
    if (params.dk_dtype == DType::f32) {
      data = static_cast<float*>(params.dk.data);
      stride = params.dk.stride0;
    } else {
      own.resize(params.problem.s_k, params.problem.d);
      data = own.data();
      stride = params.problem.d;
    }
  }
  Eigen::Map<Eigen::RowVectorXf> row(std::int64_t t, std::int64_t columns) const {
    return {data + t * stride, columns};
  }
};

void reduce_tile(const Problem& problem, const std::vector<Slot>& slots, std::int64_t queries,
                 const Accumulator& dk, const Executor& executor) {
  // Each part owns the rows of one remainder, so that neighbouring hot rows spread over the parts.
  const std::int64_t parts = executor.workers();
  executor.for_each_range(parts, 1, [&](std::int64_t part, std::int64_t, int) {
    for (std::int64_t n = 0; n < queries; ++n) {
      const Slot& slot = slots[static_cast<std::size_t>(n)];
      for (std::size_t r = 0; r < slot.row.size(); ++r) {
        if (slot.row[r] % parts != part) continue;
        dk.row(slot.row[r], problem.d) += slot.contributions.row(static_cast<Index>(r));
      }
    }
  });
}

// dq, d_weights and the contributions to dk of queries [first, first + queries).
void add_queries(const BackwardParams& params, std::int64_t first, std::int64_t queries,
                 std::vector<Slot>& slots, std::vector<Scratch>& scratch, const Accumulator& dk,
                 const Executor& executor) {
  const Problem& problem = params.problem;
  for (std::int64_t n = 0; n < queries; ++n) {
    slots[static_cast<std::size_t>(n)].dq.setZero();
    slots[static_cast<std::size_t>(n)].d_weights.setZero();
  }
  for (std::int64_t column = 0; column < params.columns(); column += kTileColumns) {
    const std::int64_t end = std::min(column + kTileColumns, params.columns());
    executor.for_each_range(queries, 1, [&](std::int64_t n, std::int64_t, int worker) {
      Slot& slot = slots[static_cast<std::size_t>(n)];
      find_entries(params, first + n, column, end, slot);
      if (slot.row.empty()) return;
      differentiate(params, first + n, slot, scratch[static_cast<std::size_t>(worker)]);
    });
    reduce_tile(problem, slots, queries, dk, executor);
  }
  for (std::int64_t n = 0; n < queries; ++n) {
    Slot& slot = slots[static_cast<std::size_t>(n)];
    for (std::int64_t h = 0; h < problem.h; ++h) {
      store_f32(params.dq_dtype, slot.dq.row(h).data(), problem.d, params.dq.data,
                params.dq.offset(first + n, h));
    }
    store_f32(params.d_weights_dtype, slot.d_weights.data(), problem.h, params.d_weights.data,
              params.d_weights.offset(first + n));
  }
}

}  // namespace

void backward_cpu(const BackwardParams& params, const Executor& executor) {
  const Problem& problem = params.problem;
  // All memory is taken before anything is written.
  const Accumulator dk(params);
  std::vector<Slot> slots(static_cast<std::size_t>(std::min(kTileQueries, problem.s_q)),
                          Slot(problem));
  for (Slot& slot : slots) {  // a copy has no capacity of its own
    slot.row.reserve(kTileColumns);
    slot.d_score.reserve(kTileColumns);
  }
  auto scratch = scratch_of_workers<Scratch>(executor, std::ssize(slots), problem);
  constexpr std::int64_t kRowGrain = 256;

  executor.for_each_range(problem.s_k, kRowGrain, [&](std::int64_t t, std::int64_t end, int) {
    for (; t < end; ++t) dk.row(t, problem.d).setZero();
  });
  for (std::int64_t first = 0; first < problem.s_q; first += kTileQueries) {
    add_queries(params, first, std::min(kTileQueries, problem.s_q - first), slots, scratch, dk,
                executor);
  }
  if (params.dk_dtype == DType::f32) return;
  executor.for_each_range(problem.s_k, kRowGrain, [&](std::int64_t t, std::int64_t end, int) {
    for (; t < end; ++t) {
      store_f32(params.dk_dtype, dk.row(t, problem.d).data(), problem.d, params.dk.data,
                params.dk.offset(t));
    }
  });
}

}  // namespace winnow::indexer
