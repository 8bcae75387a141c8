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

// The visible entries of one query, in the order of `indices`; those of a second source after them.
// Its rows and entries are numbered on, see Problem: below 2^32, as each source has below 2^31.
struct VisibleEntries {
  std::vector<std::uint32_t> row;    // the cache row
  std::vector<std::uint32_t> entry;  // its place among all entries
  Index count = 0;

  explicit VisibleEntries(const Problem& problem)
      : row(static_cast<std::size_t>(problem.all_entries())),
        entry(static_cast<std::size_t>(problem.all_entries())) {}

  void find(const Problem& problem, std::int64_t i) {
    count = 0;
    add(problem, i, 0, 0);
    add(problem.extra, i, problem.s_kv, problem.topk);
  }

 private:
  void add(const Source& source, std::int64_t i, std::int64_t first_row, std::int64_t first_entry) {
    const auto see = [&](std::int64_t t, std::int64_t j) {
      row[static_cast<std::size_t>(count)] = static_cast<std::uint32_t>(first_row + t);
      entry[static_cast<std::size_t>(count++)] = static_cast<std::uint32_t>(first_entry + j);
    };
    const RowRange visible = source.visible_rows(i);
    if (source.dense) {
      for (std::int64_t t = visible.begin; t < visible.end; ++t) see(t, t);
      return;
    }
    const std::int32_t* indices = source.indices.data + source.indices.offset(i);
    const std::int64_t entries = source.entries(i), rows = visible.end;
    for (std::int64_t j = 0; j < entries; ++j) {
      const std::int32_t index = read_once(indices + j);
      if (index >= 0 && index < rows) see(index, j);
    }
  }
};

// to[r, :] = kv[row[r], :] for r < count.
template <class Real>
void gather_rows(const Problem& problem, const std::uint32_t* row, Index count, Matrix<Real>& to) {
  for (Index r = 0; r < count; ++r) {
    const bool first = row[r] < problem.s_kv;
    const Rows<const void*>& kv = first ? problem.kv : problem.extra.kv;
    load_real(problem.dtype, kv.data, kv.offset(first ? row[r] : row[r] - problem.s_kv),
              problem.d_qk, to.row(r).data());
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
