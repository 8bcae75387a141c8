// How far the library's results are from the plain formulas.
#pragma once

#include <cstdint>
#include <span>

#include "tools/winnow/demo/layer.h"
#include "tools/winnow/demo/report.h"

namespace winnow::demo {

// Of an operation on one dtype. The logits of the demo stay below 40; the terms of the
// specification's bounds which grow with them are included.
struct Tolerances {
  double out;      // relative to the largest |out| of a query
  double lse;      // absolute
  double weights;  // relative to the largest weight of a query
};
inline constexpr Tolerances kF32Tolerances = {.out = 2e-5, .lse = 5e-5, .weights = 5e-4};
// 8 and 64 last places of a logit of 40 are 4e-5 and 3e-4.
inline constexpr Tolerances kBf16Tolerances = {
    .out = 1e-2, .lse = 1e-4 + 4e-5, .weights = 1e-3 + 3e-4};
constexpr const Tolerances& tolerances(DType dtype) {
  return dtype == DType::bf16 ? kBf16Tolerances : kF32Tolerances;
}
inline constexpr double kRowSumTolerance = 1e-3;    // relative to the number of heads; any dtype
inline constexpr double kGradientTolerance = 1e-4;  // f32; relative to the largest derivative

// The larger one; NaN if either is.
double larger(double a, double b);
// Of all elements; both lists have the same length.
double largest_difference(std::span<const float> got, std::span<const double> wanted);
double largest_magnitude(std::span<const double> values);

// Each adds to the report how the results of the queries `sample`, as rows of the selection,
// compare with plain_attention.
void check_output_against_plain(const Layer& layer, const Selection& selection,
                                const LayerOutput& output, std::span<const std::int64_t> sample,
                                StepReport& report);
void check_weights_against_plain(const Layer& layer, const Selection& selection,
                                 const Tensor& attn_sum, std::span<const std::int64_t> sample,
                                 StepReport& report);

// Adds to the report: every row of attn_sum adds up to the number of heads.
void check_row_sums(const Tensor& attn_sum, StepReport& report);

bool all_finite(const Tensor& tensor);

// `count` rows spread evenly over [0, rows), the last among them.
std::vector<std::int64_t> spread_rows(std::int64_t rows, std::int64_t count);

}  // namespace winnow::demo
