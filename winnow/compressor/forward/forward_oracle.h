// The formula of compressor::forward in double precision.
#pragma once

#include "winnow/compressor/compressor_oracle.h"
#include "winnow/compressor/forward/forward.h"

namespace winnow::compressor::oracle {

// All rows, one after the other.
inline Vector forward(const ForwardArgs& args) {
  const Inputs in = inputs_of(args);
  Vector rows;
  each_row(in, [&](std::int64_t begin, std::int64_t w, std::int64_t position) {
    const Vector row = row_of(in, begin, w, position);
    rows.insert(rows.end(), row.begin(), row.end());
  });
  return rows;
}

// 1 / sqrt(mean(row^2) + eps) of each, before its norm.
inline Vector rstd(const ForwardArgs& args) {
  const Inputs in = inputs_of(args);
  Vector rstd;
  each_row(in, [&](std::int64_t begin, std::int64_t w, std::int64_t) {
    rstd.push_back(inverse_norm(in, sum_of(in, begin, w)));
  });
  return rstd;
}

}  // namespace winnow::compressor::oracle
