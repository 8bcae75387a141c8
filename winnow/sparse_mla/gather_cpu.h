// What the CPU kernels of the three operations share: finding a query's visible entries and
// bringing its queries and cache rows into matrices of the type in which they compute: float, or
// double where the problem is in f64. Internal.
#pragma once

#include <cstdint>
#include <vector>

#include "winnow/core/read_once.h"
#include "winnow/cpu/convert.h"
#include "winnow/sparse_mla/problem.h"
#include "winnow/sparse_mla/softmax_cpu.h"

namespace winnow::sparse_mla {

// The visible entries of one query, in the order of `indices`.
struct VisibleEntries {
  std::vector<std::int32_t> row;    // the cache row
  std::vector<std::int32_t> entry;  // its place among the topk entries
  Index count = 0;

  explicit VisibleEntries(const Problem& problem)
      : row(static_cast<std::size_t>(problem.topk)),
        entry(static_cast<std::size_t>(problem.topk)) {}

  void find(const Problem& problem, std::int64_t i) {
    const RowRange visible = problem.visible_rows(i);
    count = 0;
    if (problem.dense) {
      for (std::int64_t t = visible.begin; t < visible.end; ++t) {
        row[static_cast<std::size_t>(count)] = static_cast<std::int32_t>(t);
        entry[static_cast<std::size_t>(count++)] = static_cast<std::int32_t>(t);
      }
      return;
    }
    const std::int32_t* indices = problem.indices.data + problem.indices.offset(i);
    const std::int64_t entries = problem.entries(i), rows = visible.end;
    for (std::int64_t j = 0; j < entries; ++j) {
      const std::int32_t index = read_once(indices + j);
      if (index < 0 || index >= rows) continue;
      row[static_cast<std::size_t>(count)] = index;
      entry[static_cast<std::size_t>(count)] = static_cast<std::int32_t>(j);
      ++count;
    }
  }
};

// to[r, :] = kv[row[r], :] for r < count.
template <class Real>
void gather_rows(const Problem& problem, const std::int32_t* row, Index count, Matrix<Real>& to) {
  for (Index r = 0; r < count; ++r) {
    load_real(problem.dtype, problem.kv.data, problem.kv.offset(row[r]), problem.d_qk,
              to.row(r).data());
  }
}

// to[h, :] = from[i, first + h, :] for h < count.
template <class Real>
void load_heads(DType dtype, const Rows<const void*>& from, std::int64_t i, std::int64_t first,
                std::int64_t count, std::int64_t columns, Matrix<Real>& to) {
  for (std::int64_t h = 0; h < count; ++h) {
    load_real(dtype, from.data, from.offset(i, first + h), columns, to.row(h).data());
  }
}

}  // namespace winnow::sparse_mla
