// Samples of outputs: what a case gave on one machine, to be compared with what it gives on
// another.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "winnow/core/tensor.h"
#include "winnow/testing/operation.h"

namespace winnow::testing {

// At most so many elements of an output.
inline constexpr std::int64_t kMostSampled = 1024;
// Of an output of `numel` elements in row-major order, 0, step, 2 step, ... are taken. It is odd,
// so that it meets every column where their number is a power of two.
std::int64_t sample_step(std::int64_t numel);
std::int64_t sample_count(std::int64_t numel);

// Of an output on the host. `tolerances` has one number for each of its elements.
Sample sample(std::string_view what, const ConstTensorView& output,
              std::span<const double> tolerances);

// Specials must stand where they stand in `recorded`, the others be as near as the tolerances of
// `actual` allow. Names, dtypes and shapes must be the same.
Comparison compare(const Sample& actual, const Sample& recorded);

}  // namespace winnow::testing
