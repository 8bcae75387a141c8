// Compares a tensor that an operation wrote with the values that an oracle expects.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "winnow/core/tensor.h"
#include "winnow/testing/operation.h"

namespace winnow::testing {

// What the error of an element is divided by.
enum class RelativeTo {
  nothing,  // absolute errors
  tensor,   // the largest finite magnitude that is expected anywhere
  row,      // the largest finite magnitude that is expected in the row (the last dimension)
};

struct Tolerance {
  double error = 0;  // of every element
  RelativeTo relative_to = RelativeTo::tensor;
  double cosine = 0;  // limit of the cosine distance of the whole tensor; 0: not looked at
};

// Compares `actual` (f64, f32, f16, bf16 or f8_e4m3, on the host, any strides) with `expected`,
// which holds the same elements in row-major order. Where `rows` is given, `expected` holds only
// those rows of dimension 0, in that order.
//
// Specials come first: NaN, inf and -inf must stand where they are expected and nowhere else. Then
// every element is within the tolerance, and then the cosine distance of all finite elements.
// Where the magnitude to be relative to is 0, only exact zeros pass.
Comparison compare(std::string_view what, const ConstTensorView& actual,
                   std::span<const double> expected, const Tolerance& tolerance,
                   std::span<const std::int64_t> rows = {});

// The same for numbers that are in no tensor. `shape` serves to find rows and name positions.
Comparison compare(std::string_view what, std::span<const double> actual,
                   std::span<const double> expected, std::span<const std::int64_t> shape,
                   const Tolerance& tolerance);

// The error that the tolerance allows for each element.
std::vector<double> allowed_errors(std::span<const double> expected,
                                   std::span<const std::int64_t> shape, const Tolerance& tolerance);

// All elements of a tensor on the host (a float dtype, i32 or i64), in row-major order.
std::vector<double> read(const ConstTensorView& view);
// The same of the rows `rows` of dimension 0.
std::vector<double> read_rows(const ConstTensorView& view, std::span<const std::int64_t> rows);

}  // namespace winnow::testing
