// Which rows of keys a query sees: a range for each query, and the causal limit. Internal; the
// arithmetic for host and device.
#pragma once

#include <cstdint>
#include <optional>

#include "winnow/core/host_device.h"
#include "winnow/core/read_once.h"
#include "winnow/core/rows.h"
#include "winnow/core/tensor.h"

namespace winnow {

class Check;

// Rows [begin, end); begin <= end.
struct RowRange {
  std::int64_t begin, end;
};

// Row t stands for the tokens k_stride * t and on. Rows below the result hold none after the query,
// whose position is q_start + query.
WINNOW_HOST_DEVICE constexpr std::int64_t causal_rows(std::int64_t q_start, std::int64_t k_stride,
                                                      std::int64_t query) {
  const std::int64_t tokens = q_start + query + 1;  // at or before the query
  // Row t is visible if (t + 1) * k_stride <= tokens; division truncates, so no negative numbers.
  return tokens < k_stride ? 0 : tokens / k_stride;
}

// Of a sequence's `rows` rows the last s_q are those of its queries: how many there are up to that
// of query `query`.
template <class Count>
WINNOW_HOST_DEVICE constexpr Count rows_of_step(Count rows, Count s_q, Count query) {
  const Count seen = rows - s_q + query + 1;
  return seen < 0 ? 0 : seen;
}

// The rows [start, end), with both clamped so that 0 <= begin <= end.
WINNOW_HOST_DEVICE constexpr RowRange row_range(std::int64_t start, std::int64_t end) {
  if (end < 0) end = 0;
  if (start < 0) start = 0;
  return {start < end ? start : end, end};
}

// The limits of a call. All that are given apply together.
struct RowLimits {
  Rows<const std::int32_t*> key_start;  // [s_q]; null: 0
  Rows<const std::int32_t*> key_end;    // [s_q]; null: all rows
  bool causal = false;                  // q_start and k_stride are in force
  std::int64_t q_start = 0;
  std::int64_t k_stride = 1;

  // The rows, of `rows`, that the query sees. Reads its range once.
  RowRange range_of(std::int64_t query, std::int64_t rows) const {
    std::int64_t start = 0, end = rows;
    if (key_start.present()) start = read_once(key_start.data + key_start.offset(query));
    if (key_end.present()) {
      const std::int64_t given = read_once(key_end.data + key_end.offset(query));
      if (given < end) end = given;
    }
    if (causal) {
      const std::int64_t seen = causal_rows(q_start, k_stride, query);
      if (seen < end) end = seen;
    }
    return row_range(start, end);
  }
};

// Checks the arguments of those names; throws Error naming the one at fault.
void check_positions(const Check& check, const ConstTensorView& q,
                     std::optional<std::int64_t> q_start, std::int64_t k_stride);

// The limits of checked arguments, which may lack ranges.
template <class Args>
RowLimits limits_of(const Args& args) {
  RowLimits limits;
  limits.causal = args.q_start.has_value();
  limits.q_start = args.q_start.value_or(0);
  limits.k_stride = args.k_stride;
  if constexpr (requires { args.key_start; }) {
    limits.key_start = rows_of<const std::int32_t*>(args.key_start, 0);
    limits.key_end = rows_of<const std::int32_t*>(args.key_end, 0);
  }
  return limits;
}

}  // namespace winnow
