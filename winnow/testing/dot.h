// Dot products of the oracles.
#pragma once

#include <cstdint>
#include <span>

namespace winnow::testing {

// Of the first `count` elements, in four sums side by side: a single one waits for itself at every
// step.
inline double dot(std::span<const double> left, std::span<const double> right, std::int64_t count) {
  const double *const a = left.data(), *const b = right.data();
  const std::int64_t whole = count / 4 * 4;
  double sum0 = 0, sum1 = 0, sum2 = 0, sum3 = 0;
  for (std::int64_t c = 0; c < whole; c += 4) {
    sum0 += a[c] * b[c];
    sum1 += a[c + 1] * b[c + 1];
    sum2 += a[c + 2] * b[c + 2];
    sum3 += a[c + 3] * b[c + 3];
  }
  for (std::int64_t c = whole; c < count; ++c) sum0 += a[c] * b[c];
  return (sum0 + sum1) + (sum2 + sum3);
}

}  // namespace winnow::testing
