// The exponential of the CPU kernels. Internal; compiled once per instruction set.
#pragma once

#include <Eigen/Core>

namespace winnow {

// exp(x) of each element of an Eigen array: exactly 0 for -inf, inf for inf and wherever the result
// is too large, NaN for NaN. Eigen's own exp clamps its argument to where the result is an ordinary
// number, so it is neither 0 nor inf beyond. The square of exp(x / 2) is: halving x is exact, the
// clamp is reached only where the square underflows or overflows, and the error is twice that of
// Eigen's exp, a few units in the last place.
template <class Array>
auto exp_of(const Array& x) {
  return (x * typename Array::Scalar(0.5)).exp().square();
}

}  // namespace winnow
